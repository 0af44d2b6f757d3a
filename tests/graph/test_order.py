"""What has to be waited for, and what depends on it, comes behind all else; the rest stays put."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mpcompile.graph.order import put_off

RELU, COPY_INTO = torch.ops.aten.relu.default, torch.ops.aten.copy_.default


def chain(graph: Graph, source: Node, name: str) -> Node:
    node = graph.call_function(RELU, (source,))
    node.name = name
    return node


def order(graph: Graph) -> list[str]:
    graph.lint()
    return [node.name for node in graph.nodes]


def test_independent_nodes_come_first_in_their_order() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    wait = chain(graph, x, "wait")
    reader = chain(graph, wait, "reader")
    early = chain(graph, x, "early")
    late = chain(graph, early, "late")
    graph.output((reader, late))
    put_off(graph, {wait})
    assert order(graph) == ["x", "early", "late", "wait", "reader", "output"]


def test_wait_that_depends_on_a_wait_comes_behind_what_needs_one() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = chain(graph, x, "first")
    second = chain(graph, chain(graph, first, "between"), "second")
    other = chain(graph, x, "other")
    needs_other = chain(graph, other, "needs_other")
    graph.output((second, needs_other))
    put_off(graph, {first, second, other})
    assert order(graph)[1:] == ["first", "between", "other", "needs_other", "second", "output"]


def test_node_in_front_of_what_it_reads_is_moved_behind_it() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    reader = chain(graph, x, "reader")
    later = chain(graph, x, "later")
    reader.args = (later,)
    graph.output((reader,))
    put_off(graph, set())
    assert order(graph) == ["x", "later", "reader", "output"]


def test_writes_into_inputs_stay_at_the_end() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    wait = chain(graph, x, "wait")
    reads_old = graph.call_function(torch.ops.aten.add.Tensor, (wait, x))
    new = chain(graph, x, "new")
    write = graph.call_function(COPY_INTO, (x, new))
    graph.output((reads_old,))
    put_off(graph, {wait})
    assert order(graph) == ["x", "new", "wait", reads_old.name, write.name, "output"]


def test_graph_without_waits_is_left_alone() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((chain(graph, chain(graph, x, "one"), "two"),))
    before = order(graph)
    put_off(graph, set())
    assert order(graph) == before
