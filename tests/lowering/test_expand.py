"""Decompositions behind the passes are those that Inductor's own tracing takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from mpcompile.graph import nodes
from mpcompile.graph.diff import op_counts
from mpcompile.graph.printer import format_graph
from mpcompile.graph.verify import verify_graph, visible_types
from mpcompile.lowering import expand
from mpcompile.lowering.expand import expand_decompositions
from tests.graph.trace import find, record, trace


def expanded(gm: GraphModule) -> tuple[GraphModule, int]:
    count = expand_decompositions(gm, select_decomp_table())
    gm.graph.lint()
    return gm, count


def test_expanded_graph_computes_the_same() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        hidden = F.layer_norm(x @ weight, (8,))
        values, indices = hidden.max(1)
        return F.softmax(F.gelu(hidden), -1), values, indices, F.silu(hidden).var(0)

    inputs = torch.randn(4, 8), torch.randn(8, 8)
    gm, count = expanded(trace(function, *inputs))
    assert count >= 4
    assert not any(op in format_graph(gm.graph) for op in ("layer_norm", "gelu", "silu"))
    torch.testing.assert_close(tuple(gm(*inputs)), function(*inputs))


def test_ops_without_decomposition_are_left_alone() -> None:
    gm = trace(lambda x, y: torch.relu(x @ y), torch.ones(2, 2), torch.ones(2, 2))
    before = format_graph(gm.graph)
    assert expanded(gm)[1] == 0
    assert format_graph(gm.graph) == before


def test_equal_nodes_are_traced_once() -> None:
    calls = []
    table = dict(select_decomp_table())
    gelu = table[torch.ops.aten.gelu.default]

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return gelu(*args, **kwargs)

    table[torch.ops.aten.gelu.default] = counting
    gm = trace(lambda x: F.gelu(F.gelu(F.gelu(x))).sum() + F.gelu(x[0]).sum(), torch.ones(2, 4))
    assert expand_decompositions(gm, table) >= 4
    assert len(calls) == 2  # one for each shape


def test_new_nodes_carry_tags_and_values() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU())
    recorder = record(lambda x: model(x).sum(), torch.ones(3, 4))
    graph = recorder.graphs[0]
    gm = GraphModule(model, graph)
    visible = visible_types(gm.graph)
    expanded(gm)
    made = find(gm.graph, "aten.rsqrt")
    assert [nodes.module_path(node) for node in made] == ["model.1"]
    assert all(
        node.meta["original_aten"] is torch.ops.aten.native_layer_norm.default for node in made
    )
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    assert any(nodes.is_backward(node) for node in find(gm.graph, "aten.mul"))
    verify_graph(gm.graph, visible, "expand")


def test_random_ops_keep_their_order() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.native_dropout(F.silu(x), 0.5, True)[0] + torch.rand_like(x)

    gm, _ = expanded(trace(function, torch.ones(4)))
    ops = op_counts(format_graph(gm.graph))
    assert sum(count for op, count in ops.items() if "rand" in op or "dropout" in op) == 2


def test_gradients_of_fused_qkv_survive_expansion() -> None:
    """Equal nodes share a traced expansion; what reads all of them must not read one thrice."""

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        query, key, value = (x @ weight).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 16), torch.randn(16, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(attend(x, weight).square().sum(), weight)
    compiled = torch.compile(attend, backend="mpcompile")
    (found,) = torch.autograd.grad(compiled(x, weight).square().sum(), weight)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.02  # bfloat16 rounds at 2**-9; a lost gradient gives more than 1


def test_expanded_nodes_share_no_storage() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.gelu(x), F.gelu(y), F.gelu(x)])

    gm = trace(function, torch.randn(4, 4), torch.randn(4, 4))
    expand_decompositions(gm, select_decomp_table())
    values = [nodes.value(node) for node in gm.graph.nodes if nodes.op_name(node) == "aten.erf"]
    assert len({id(val) for val in values}) == len(values) == 3


def test_unused_name_is_found() -> None:
    owner = GraphModule({"_tensor_constant0_0": torch.ones(1)}, torch.fx.Graph())
    owner.register_buffer("_tensor_constant0_0", torch.ones(1))
    assert expand._unused_name(owner, "_tensor_constant0") == "_tensor_constant0_1"
