"""Nodes know their module, line and forward node; inserted ones carry the tags of their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompile.graph import nodes
from mpcompile.graph.links import find_links
from mpcompile.graph.verify import verify_graph, visible_types
from tests.graph.trace import find, record, trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        out: Tensor = self.down(hidden)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_module_path_names_the_users_attributes() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    paths = [nodes.module_path(node) for node in find(graph, "aten.addmm")]
    assert paths == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


def test_module_path_of_a_global_or_closure_starts_with_its_name() -> None:
    net = Net()
    graph = record(lambda x: net(x), torch.ones(3, 4)).graphs[0]
    assert nodes.module_path(find(graph, "aten.addmm")[0]) == "net.layers.0.up"


def test_backward_nodes_carry_the_module_of_their_forward() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    paths = {nodes.module_path(node) for node in find(graph, "aten.mm")}
    assert paths == {"layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"}
    assert all(nodes.is_backward(node) for node in find(graph, "aten.mm"))


def test_user_line_is_the_innermost_line_outside_torch() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    line = Block.forward.__code__.co_firstlineno + 1
    (first, *_) = find(graph, "aten.relu")
    assert nodes.user_line(first) == f"test_nodes.py:{line}"


def test_node_made_by_hand_has_no_line_and_no_module() -> None:
    (node,) = find(trace(torch.relu, torch.ones(2)).graph, "aten.relu")
    node.meta.pop("stack_trace", None)
    assert nodes.user_line(node) == ""
    assert nodes.module_path(node) == ""


def test_backward_nodes_are_linked_to_their_forward_node() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    links = find_links(graph).forward
    found = {node.name: nodes.op_name(links[node]) for node in find(graph, "aten.mm")}
    assert set(found.values()) == {"aten.addmm"}
    assert len({links[node] for node in find(graph, "aten.mm")}) == 4
    for node in find(graph, "aten.threshold_backward"):
        assert nodes.op_name(links[node]) == "aten.relu"


def test_forward_nodes_have_no_link() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    assert not any(not nodes.is_backward(node) for node in find_links(graph).forward)


def test_inserted_cast_has_value_and_tags_of_its_place() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        out = checkpoint(lambda: torch.relu(x @ weight).exp(), use_reentrant=False)
        assert isinstance(out, Tensor)
        return out.sum()

    graph = record(forward, torch.ones(2, 4), torch.ones(4, 4, requires_grad=True)).graphs[0]
    visible = visible_types(graph)
    (relu,) = find(graph, "aten.relu")
    cast = nodes.insert_cast(relu, torch.bfloat16, relu)
    assert nodes.value(cast).dtype is torch.bfloat16
    assert nodes.user_line(cast) == nodes.user_line(relu) != ""
    assert cast.meta["recompute"] == relu.meta["recompute"]
    assert cast.meta.get("ac_graph_id") == relu.meta.get("ac_graph_id")
    assert nodes.is_cast(cast)
    verify_graph(graph, visible, "test")


def test_cast_of_a_graph_input_stands_behind_all_inputs_with_its_readers_tags() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    reader = find(graph, "aten.addmm")[0]
    source = next(arg for arg in nodes.input_nodes(reader) if arg.op == "placeholder")
    cast = nodes.insert_cast(source, torch.bfloat16, reader)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    assert cast.prev is placeholders[-1]
    assert nodes.module_path(cast) == "layers.0.up"
    graph.lint()


def test_backward_cast_is_tagged_as_backward() -> None:
    graph = record(Net(), torch.ones(3, 4)).graphs[0]
    gradient = find(graph, "aten.mm")[0]
    cast = nodes.insert_cast(gradient, torch.float32, gradient)
    assert nodes.is_backward(cast)


@pytest.mark.parametrize(
    ("function", "is_cast"),
    [
        (lambda x: x.to(torch.bfloat16), True),
        (lambda x: x.to(torch.float64), True),
        (lambda x: x.to(torch.bfloat16, memory_format=torch.channels_last), False),
        (lambda x: x.clone(), False),
    ],
)
def test_cast_changes_the_dtype_and_nothing_else(function: object, is_cast: bool) -> None:
    assert callable(function)
    node = next(n for n in trace(function, torch.ones(1, 2, 3, 3)).graph.nodes if n.op[0] == "c")
    assert nodes.is_cast(node) is is_cast


def test_dead_nodes_go_with_what_they_alone_kept_alive() -> None:
    graph = trace(lambda x: (x.exp().sin(), x + 1)[1], torch.ones(2)).graph
    (sin,) = find(graph, "aten.sin")
    nodes.erase_dead(graph, [sin])
    assert find(graph, "aten.sin") == find(graph, "aten.exp") == []
    assert len(find(graph, "aten.add")) == 1


def test_values_that_something_reads_are_kept() -> None:
    graph = trace(lambda x: x.exp().sin(), torch.ones(2)).graph
    nodes.erase_dead(graph, [*find(graph, "aten.exp"), *find(graph, "aten.sin")])
    assert len(find(graph, "aten.sin")) == 1


def test_gap_between_rows_is_not_dense() -> None:
    graph = trace(lambda x: (x[:, :2], x.t()), torch.ones(4, 4)).graph
    (view,) = find(graph, "aten.slice")[-1:]
    (transposed,) = find(graph, "aten.t")
    assert not nodes.is_dense(view)
    assert nodes.is_dense(transposed)
