"""Where a backward begins in a flat graph: the gradients that it is given, or makes of a loss.

A gradient of ones is autograd's own and known by its op. One that the program gives is any value,
so ``capture`` hands it on through a view with a mark; and it marks what a backward makes that may
be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor
from torch.fx import Graph, Node

from mpcompile.graph import nodes

SEED_MARK = "mpcompile_seed"
"""The key in ``meta["custom"]`` of a view of a gradient that the program gives to a backward."""
CREATES_GRAPH_MARK = "mpcompile_creates_graph"
"""The key of what a backward with ``create_graph`` makes, the gradient it begins with included."""


def find_seeds(graph: Graph, is_differentiated: bool) -> list[Node]:
    """Return what backward passes begin with, in order.

    A backward that another may go through is left out: scaled twice, the second would not be linear
    in its scale.

    Args:
        graph: the graph.
        is_differentiated: whether a backward of the whole graph is part of it.
    """
    seeds = [node for node in graph.nodes if _is_seed(node)]
    last = len(seeds) - 1
    return [
        seed
        for index, seed in enumerate(seeds)
        if not (_has_mark(seed, CREATES_GRAPH_MARK) and (is_differentiated or index < last))
    ]


def _is_seed(node: Node) -> bool:
    if _has_mark(node, SEED_MARK):
        return nodes.is_view(node)
    return nodes.is_backward(node) and nodes.op_name(node) == "aten.ones_like"


def _has_mark(node: Node, mark: str) -> bool:
    return mark in (node.meta.get("custom") or ())


def program_scales(starts: Iterable[Node]) -> list[float]:
    """Return the powers of two by which the program scales losses itself, at least one each.

    As far as constants tell: ``(loss * 1024).backward()`` does.

    Args:
        starts: what backward begins with, a gradient of each loss.
    """
    found = [abs(_factor_behind(start)) for start in starts]
    return [2.0 ** (math.frexp(f)[1] - 1) if 1.0 <= f < math.inf else 1.0 for f in found]


def _factor_behind(start: Node) -> float:
    """Return what numbers multiply the gradient ``start`` by before it spreads."""
    factor, node = 1.0, start
    while _is_number(node) and len(node.users) == 1:
        (reader,) = node.users
        step = _factor_of(reader)
        if step is None:
            break
        factor, node = factor * step, reader
    return factor


def _factor_of(node: Node) -> float | None:
    """Return what ``node`` multiplies its first operand by, or None."""
    if nodes.is_cast(node) or nodes.is_view(node):
        return 1.0
    operand = node.args[1] if len(node.args) == 2 else None
    if not isinstance(operand, (int, float)) or not operand:
        return None
    return {"aten.mul": operand, "aten.div": 1.0 / operand}.get(nodes.op_name(node))


def _is_number(node: Node) -> bool:
    value = nodes.value(node)
    return isinstance(value, Tensor) and value.dim() == 0
