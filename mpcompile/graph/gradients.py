"""Gradients in the graph of a whole step: which outputs only the update reads, and their copies.

Dynamo gives every new gradient a tensor of its own (``empty_like`` and ``copy``), since a gradient
may be a view, or be the gradient of several parameters. Where it is neither, the copy goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch.fx import Graph, Node

from mpcompile.graph import nodes

GRADIENT_OF = "mpcompile_gradient_of"
"""The key in the metadata of a node of a flat backward that says whose gradient it is."""
_PRIVATE = "mpcompile_private"


def mark_private(graph: Graph, positions: Collection[int]) -> None:
    """Note that only the runtime sees the outputs at ``positions`` of the traced function."""
    graph.output_node().meta[_PRIVATE] = frozenset(positions_of(graph, positions))


def positions_of(graph: Graph, positions: Collection[int]) -> tuple[int, ...]:
    """Return where the graph has the outputs at ``positions`` of the traced function, in order."""
    descs = graph.output_node().meta.get("desc") or ()
    found = {
        desc.idx: index for index, desc in enumerate(descs) if isinstance(desc, PlainAOTOutput)
    }
    return tuple(found[position] for position in positions if position in found)


def private_outputs(graph: Graph) -> frozenset[int]:
    """Return the positions of outputs that only the runtime sees: any float dtype will do."""
    found: frozenset[int] = graph.output_node().meta.get(_PRIVATE, frozenset())
    return found


def drop_copies(graph: Graph) -> int:
    """Let gradients stand for their copies where these have the same type; return how many.

    What the graph returns stays a copy if it would share memory with another output or an input.
    """
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    returned = [node for node in outputs if isinstance(node, Node)]
    copies = [node for node in graph.nodes if _is_new_copy(node)]
    roots = Counter(nodes.root(_copied(node) if node in copies else node) for node in returned)
    dropped = []
    for node in copies:
        source = _copied(node)
        root = nodes.root(source)
        is_own = roots[root] == 1 and root.op == "call_function"
        if (is_own or node not in returned) and _has_type_of(source, node):
            node.replace_all_uses_with(source)
            dropped.append(node)
    nodes.erase_dead(graph, dropped)
    return len(dropped)


def _is_new_copy(node: Node) -> bool:
    if node.target is not torch.ops.aten.copy.default:
        return False
    target = node.args[0]
    return isinstance(target, Node) and target.target is torch.ops.aten.empty_like.default


def _copied(node: Node) -> Node:
    source = node.args[1]
    assert isinstance(source, Node)
    return source


def _has_type_of(node: Node, other: Node) -> bool:
    ours, theirs = nodes.value(node), nodes.value(other)
    if not isinstance(ours, Tensor) or ours.layout is not torch.strided:
        return False
    return ours.dtype is theirs.dtype and nodes.has_same_strides(ours, theirs)


def gradient_name(node: Node) -> str:
    """Return whose gradient ``node`` is, or ''; it may be a cast or a view of the one with a name.

    Casts and views behind it count as well.
    """
    pending = [node, *(user for user in node.users if _passes_on(user))]
    while pending:
        here = pending.pop(0)
        if GRADIENT_OF in here.meta:
            return str(here.meta[GRADIENT_OF])
        if _passes_on(here):
            pending += here.all_input_nodes[:1]
    return ""


def _passes_on(node: Node) -> bool:
    return nodes.is_cast(node) or nodes.is_view(node)
