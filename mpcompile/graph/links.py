"""Link backward nodes to the forward node whose gradient they compute.

Autograd numbers the functions it records; AOTAutograd writes that number on the forward node that
was recorded and on every node that its backward ran (``meta["seq_nr"]``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from mpcompile.graph import nodes
from mpcompile.graph.seeds import CREATES_GRAPH_MARK, SEED_MARK

_OF_ONE_BACKWARD = (CREATES_GRAPH_MARK, SEED_MARK)
"""Marks that say nothing of a backward through the marked node."""


@dataclass(frozen=True)
class Links:
    """Where backward nodes come from.

    Attributes:
        forward: for a backward node the forward node whose gradient it computes.
        sums: nodes with which autograd adds up the gradients of a value that is read twice. They
            belong to no forward node, whatever number or module stack they carry.
    """

    forward: dict[Node, Node] = field(default_factory=dict)
    sums: frozenset[Node] = frozenset()

    def origin(self, node: Node) -> Node:
        """Return the forward node of a backward one, else ``node`` itself."""
        return self.forward.get(node, node)

    def gradient_of(self, node: Node) -> list[Node]:
        """Return the forward nodes whose results ``node`` is a gradient of.

        They are those that the next readers differentiate; sums are passed through. Several, since
        the backward of an addition hands its gradient on as it is. Empty if ``node`` is an
        intermediate value of one backward function, or a gradient of an input.
        """
        here = self.forward.get(node)
        found: dict[Node, None] = {}
        pending, seen = list(node.users), set[Node]()
        while pending:
            reader = pending.pop()
            if reader in self.sums and reader not in seen:
                seen.add(reader)
                pending.extend(reader.users)
                continue
            there = self.forward.get(reader)
            if there is not None and there is not here:
                found[there] = None
        return list(found)


def find_links(graph: Graph) -> Links:
    """Link the backward nodes of a joint graph.

    Nodes that autograd does not record carry the number of the one before that it did record, so
    of several nodes with one number the first is meant.
    """
    recorded: dict[int, Node] = {}
    backward: list[Node] = []
    sums: set[Node] = set()
    last = 0  # the largest number so far; a step may go forward again after a backward
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if node.op != "call_function" or number is None:
            continue
        if nodes.is_backward(node):
            backward.append(node)
            if number >= last and _adds_gradients(node):
                sums.add(node)
        else:
            recorded.setdefault(number, node)
            last = max(last, number)
    forward = {
        node: recorded[node.meta["seq_nr"]]
        for node in backward
        if node not in sums and node.meta["seq_nr"] in recorded
    }
    return Links(forward, frozenset(sums))


def copy_forward_tags(graph: Graph) -> None:
    """Give backward nodes of a flat graph what AOTAutograd gives those of a joint one.

    That is the module stack and the annotations (our pins among them) of their forward nodes.
    """
    for node, origin in find_links(graph).forward.items():
        if "nn_module_stack" in origin.meta:
            node.meta.setdefault("fwd_nn_module_stack", origin.meta["nn_module_stack"])
        custom = origin.meta.get("custom") or {}
        handed_on = {key: mark for key, mark in custom.items() if key not in _OF_ONE_BACKWARD}
        if handed_on:
            node.meta["custom"] = {**handed_on, **node.meta.get("custom", {})}


def _adds_gradients(node: Node) -> bool:
    """Between two functions autograd's counter stands at the last forward one or behind it."""
    return node.target is torch.ops.aten.add.Tensor and all(
        isinstance(arg, Node) and (nodes.is_backward(arg) or arg.op == "placeholder")
        for arg in node.args
    )
