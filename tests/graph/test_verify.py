"""The verifier finds planted faults and says what and where."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from mpcompile.errors import GraphVerifyError
from mpcompile.graph import nodes
from mpcompile.graph.verify import verify_graph, verify_visible, visible_types
from tests.graph.trace import find, trace


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight.t())


def graph_of_product() -> Graph:
    return trace(product, torch.ones(2, 4), torch.ones(3, 4)).graph


def test_untouched_graph_is_valid() -> None:
    graph = graph_of_product()
    verify_graph(graph, visible_types(graph), "test")


def test_stale_type_is_found() -> None:
    graph = graph_of_product()
    visible = visible_types(graph)
    (mm,) = find(graph, "aten.mm")
    for arg in nodes.input_nodes(mm):
        nodes.replace_input(mm, arg, nodes.insert_cast(arg, torch.bfloat16, mm))
    with pytest.raises(
        GraphVerifyError,
        match=r"insert-casts: %mm: f32\[2,3\] = .* is recorded as f32\[2,3\] but its inputs give "
        r"bf16\[2,3\]; the rewrite forgot to refresh it",
    ):
        verify_graph(graph, visible, "insert-casts")


def test_inputs_that_an_op_refuses_are_found() -> None:
    graph = trace(torch.linalg.vector_norm, torch.ones(3)).graph
    visible = visible_types(graph)
    (norm,) = find(graph, "aten.linalg_vector_norm")
    arg = nodes.input_nodes(norm)[0]
    nodes.replace_input(norm, arg, nodes.insert_cast(arg, torch.int64, norm))
    with pytest.raises(
        GraphVerifyError,
        match=r"aten.linalg_vector_norm.* cannot take its inputs i64\[3\]: .*"
        r"keep_fp32': \['aten.linalg_vector_norm'\]",
    ):
        verify_graph(graph, visible, "insert-casts")


def test_narrowed_output_is_found() -> None:
    graph = graph_of_product()
    visible = visible_types(graph)
    (relu,) = find(graph, "aten.relu")
    nodes.replace_input(
        graph.output_node(), relu, nodes.insert_cast(relu, torch.bfloat16, graph.output_node())
    )
    with pytest.raises(
        GraphVerifyError,
        match=r"fold-casts: output 0 was torch.float32.* became torch.bfloat16.*"
        r"options=\{'disable': \['fold-casts'\]\}",
    ):
        verify_graph(graph, visible, "fold-casts")


def test_output_with_other_strides_is_found() -> None:
    graph = graph_of_product()
    visible = visible_types(graph)
    (relu,) = find(graph, "aten.relu")
    copied = nodes.insert_strided_copy(relu, (2, 3), (1, 2))
    nodes.replace_input(graph.output_node(), relu, copied)
    with pytest.raises(GraphVerifyError, match=r"strides \[3, 1\] .* strides \[1, 2\]"):
        verify_visible(graph, visible, "test")


def test_narrowed_write_to_an_input_is_found() -> None:
    def update(weight: Tensor, grad: Tensor) -> None:
        weight.copy_(weight - grad)

    graph = trace(update, torch.ones(3), torch.ones(3)).graph
    visible = visible_types(graph)
    (write,) = find(graph, "aten.copy_")
    source = nodes.input_nodes(write)[1]
    nodes.replace_input(write, source, nodes.insert_cast(source, torch.bfloat16, write))
    with pytest.raises(GraphVerifyError, match=r"what is written to %weight_1 was torch.float32"):
        verify_visible(graph, visible, "test")


def test_lost_output_is_found() -> None:
    graph = trace(lambda x: (x + 1, x + 2), torch.ones(3)).graph
    visible = visible_types(graph)
    graph.output_node().args = ([find(graph, "aten.add")[0]],)
    with pytest.raises(GraphVerifyError, match=r"test: the graph had 2 visible values and has 1"):
        verify_visible(graph, visible, "test")


def test_use_before_definition_is_found() -> None:
    graph = graph_of_product()
    visible = visible_types(graph)
    (relu,), (mm,) = find(graph, "aten.relu"), find(graph, "aten.mm")
    mm.prepend(relu)
    with pytest.raises(GraphVerifyError, match="test: the rewritten graph is malformed"):
        verify_graph(graph, visible, "test")


def test_picked_result_with_a_stale_type_is_found() -> None:
    graph = trace(lambda x: torch.max(x, 1)[0], torch.ones(2, 3)).graph
    picked = next(node for node in graph.nodes if node.target is operator.getitem)
    nodes.set_value(picked, nodes.value(picked).double())
    with pytest.raises(GraphVerifyError, match=r"is recorded as f64\[2\] but .* give f32\[2\]"):
        verify_graph(graph, visible_types(graph), "test")
