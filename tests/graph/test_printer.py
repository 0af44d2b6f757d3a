"""Prints are stable and say dtype, shape and op of every node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from mpcompile.graph import nodes
from mpcompile.graph.printer import format_dtype, format_graph, format_value
from tests.graph.trace import record, trace


def test_two_traces_of_one_function_print_equal() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    first = [format_graph(graph) for graph in record(step, torch.ones(3, 4)).graphs]
    model.zero_grad()
    torch._dynamo.reset()
    second = [format_graph(graph) for graph in record(step, torch.ones(3, 4)).graphs]
    assert first == second
    assert "aten.native_layer_norm_backward" in first[0]


def test_print_has_one_line_a_node() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        values, _ = torch.max(x.to(torch.bfloat16), dim=1)
        return values, torch.cat([x, y])

    text = format_graph(trace(function, torch.ones(2, 4), torch.ones(2, 4)).graph)
    assert text.splitlines() == [
        "%x_1: f32[2,4] = placeholder",
        "%y_1: f32[2,4] = placeholder",
        "%_to_copy: bf16[2,4] = aten._to_copy(%x_1, dtype=bf16)",
        "%max_1: (bf16[2], i64[2]) = aten.max(%_to_copy, 1)",
        "%getitem: bf16[2] = getitem(%max_1, 0)",
        "%getitem_1: i64[2] = getitem(%max_1, 1)",
        "%cat: f32[4,4] = aten.cat([%x_1, %y_1])",
        "return [%getitem, %cat]",
    ]


def test_constants_of_the_graph_are_named() -> None:
    graph = Graph()
    constant = graph.get_attr("table")
    nodes.set_value(constant, torch.ones(3, dtype=torch.int32))
    graph.output((constant,))
    assert format_graph(graph) == "%table: i32[3] = get_attr[table]\nreturn [%table]"


def test_nodes_without_a_value_are_marked() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_method("float", (x,)),))
    assert format_graph(graph).splitlines()[:2] == [
        "%x: ? = placeholder",
        "%float_1: ? = .float(%x)",
    ]


def test_symbolic_sizes_are_printed_as_symbols() -> None:
    rows = torch.ones(4, 6)
    torch._dynamo.mark_dynamic(rows, 0)
    graph = record(lambda x: torch.relu(x), rows).graphs[0]
    (symbol,) = (node for node in graph.nodes if isinstance(nodes.value(node), torch.SymInt))
    name = str(nodes.value(symbol))
    lines = format_graph(graph).splitlines()
    assert lines[0] == f"%{symbol.name}: Sym({name}) = placeholder"
    assert lines[1].endswith(f": f32[{name},6] = placeholder")


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float64, "f64"),
        (torch.bool, "b8"),
        (torch.complex64, "c64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_dtypes_have_short_names(dtype: torch.dtype, text: str) -> None:
    assert format_dtype(dtype) == text


def test_values_that_are_no_tensor_are_printed_as_they_are() -> None:
    assert format_value((torch.ones(2), None, 3)) == "(f32[2], None, 3)"
