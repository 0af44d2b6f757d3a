"""Link backward nodes to the forward node whose gradient they compute.

Autograd numbers the functions it records; AOTAutograd writes that number on the forward node that
was recorded and on every node that its backward ran (``meta["seq_nr"]``).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from mpcompile.graph import nodes


def forward_links(graph: Graph) -> dict[Node, Node]:
    """Map each backward node to its forward node; nodes that autograd added itself are missing.

    Forward nodes that need no gradient carry the number of the next one that does, so of several
    nodes with one number the last is meant.
    """
    recorded: dict[int, Node] = {}
    links: dict[Node, Node] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if node.op != "call_function" or number is None:
            continue
        if not nodes.is_backward(node):
            if not nodes.is_getitem(node) and not _is_saved_result(node):
                recorded[number] = node
        elif number in recorded:
            links[node] = recorded[number]
    return links


def _is_saved_result(node: Node) -> bool:
    """A detached result that autograd saves for backward: it carries the number of its source."""
    if node.target is not torch.ops.aten.detach.default:
        return False
    (source,) = node.all_input_nodes
    return source.meta.get("seq_nr") == node.meta.get("seq_nr")
