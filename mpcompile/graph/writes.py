"""Writes into inputs of a graph, and how to leave them out: a value on the device decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mpcompile.graph import nodes
from mpcompile.graph.factors import is_float
from mpcompile.graph.roles import written_input


@dataclass(frozen=True)
class Write:
    """A write of ``source`` into the input ``target``."""

    node: Node
    target: Node
    source: Node


def find_writes(graph: Graph) -> Iterator[Write]:
    """Yield each write of ``graph`` into an input."""
    for node in graph.nodes:
        target = written_input(node)
        if target is not None and isinstance(source := node.args[1], Node):
            yield Write(node, target, source)


def write_or_keep(write: Write, skip: Node) -> None:
    """Write what was there before if ``skip`` is set."""
    chosen = (skip, write.target, write.source)
    kept = nodes.call_after(max(skip, write.source), torch.ops.aten.where.self, chosen, {})
    nodes.replace_input(write.node, write.source, _as_written(kept, write))


def keep_overflow(write: Write) -> bool:
    """Write a gradient that is not finite as it was: an update is to see it."""
    if not is_float(write.target):
        return False
    aten = torch.ops.aten
    size = nodes.call_after(write.target, aten.abs.default, (write.target,), {})
    finite = nodes.call_after(size, aten.lt.Scalar, (size, float("inf")), {})
    chosen = (finite, write.source, write.target)
    kept = nodes.call_after(max(finite, write.source), aten.where.self, chosen, {})
    nodes.replace_input(write.node, write.source, _as_written(kept, write))
    return True


def _as_written(value: Node, write: Write) -> Node:
    """Give ``value`` the strides of what was written before."""
    val = cast(Tensor, nodes.value(write.source))
    if nodes.has_same_strides(cast(Tensor, nodes.value(value)), val):
        return value
    return nodes.insert_strided_copy(value, tuple(val.shape), tuple(val.stride()))
