"""Where a backward begins in a flat graph: the gradients that it is given, or makes of a loss.

A gradient of ones is autograd's own and known by its op. One that the program gives is any value,
so ``capture`` hands it on through a view with a mark; and it marks what a backward makes that may
be differentiated again.
"""

from __future__ import annotations

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
