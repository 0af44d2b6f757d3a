"""The peak of a graph against one counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from mpcompile.graph import nodes
from mpcompile.graph.roles import InputRole
from mpcompile.inspection.memory import GraphPart, MemoryPeak, MemoryRole, RegionMemory
from tests.graph.trace import trace

KIB = 1024


def peak(graph: Graph, *roles: InputRole, part: GraphPart = GraphPart.WHOLE) -> MemoryPeak:
    """Measure ``graph`` with ``roles`` of its inputs; what a ``tan`` computes is backward."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), roles, strict=True))
    backward = {node for node in graph.nodes if nodes.op_name(node) == "aten.tan"}
    memory = RegionMemory()
    memory.measure(graph, inputs, backward, part)
    assert memory.peak is not None
    return memory.peak


def test_values_die_with_their_last_reader_and_views_keep_them() -> None:
    def function(x: Tensor) -> Tensor:
        first = x + 1  # 1 KiB, read last through a view
        second = first.view(16, 16) * 2
        third = second.sum(1)  # first is gone
        return torch.cat([third] * 64)  # 4 KiB

    found = peak(trace(function, torch.ones(256)).graph, InputRole.DATA)
    assert found.node == "cat"
    assert found.bytes == {MemoryRole.INPUT: KIB, MemoryRole.TEMPORARY: 4 * KIB + 64}


def test_roles_of_a_step_in_one_graph() -> None:
    def function(weight: Tensor, x: Tensor) -> Any:
        half = weight.to(torch.bfloat16)
        kept = x * 3
        return kept.to(torch.bfloat16) * half, kept.tan(), kept.tan()

    graph = trace(function, torch.ones(256), torch.ones(256)).graph
    found = peak(graph, InputRole.PARAMETER, InputRole.DATA)
    assert found.is_backward
    assert found.bytes == {
        MemoryRole.PARAMETER: KIB,
        MemoryRole.INPUT: KIB,
        MemoryRole.ACTIVATION: KIB,
        MemoryRole.GRADIENT: 2 * KIB,
        MemoryRole.TEMPORARY: KIB // 2,
    }


def test_casts_of_parameters_are_copies() -> None:
    def function(weight: Tensor) -> Tensor:
        return weight.t().to(torch.bfloat16) * 1

    found = peak(trace(function, torch.ones(16, 16)).graph, InputRole.PARAMETER)
    assert found.bytes == {
        MemoryRole.PARAMETER: KIB,
        MemoryRole.COPY: KIB // 2,
        MemoryRole.TEMPORARY: KIB // 2,
    }


def test_results_of_views_of_several_parts_take_no_memory() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = x.split(128)
        low, _ = torch.max(first.view(8, 16) + second.view(8, 16), 1)
        return low

    found = peak(trace(function, torch.ones(256)).graph, InputRole.DATA)
    assert found.node == "max_1"
    assert found.bytes == {MemoryRole.INPUT: KIB, MemoryRole.TEMPORARY: 512 + 8 * 4 + 8 * 8}


def test_backward_frees_what_forward_kept_for_it() -> None:
    def cut(kept: Tensor, tangent: Tensor) -> Tensor:
        return torch.cat([(kept * tangent).sum().view(1)] * 512)

    graph = trace(cut, torch.ones(256), torch.ones(256)).graph
    found = peak(graph, InputRole.DATA, InputRole.TANGENT, part=GraphPart.BACKWARD)
    assert found.bytes == {MemoryRole.ACTIVATION: KIB, MemoryRole.TEMPORARY: 2 * KIB}
