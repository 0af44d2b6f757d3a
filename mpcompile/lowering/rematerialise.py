"""Recompute cheap forward values in the backward of a whole step, as the partitioner would.

AOTAutograd partitions joint graphs only; in a flat one, whatever backward reads stays alive. So
torch's own partitioner is asked about a copy of the graph, cut at the seeds of backward, and what
it would not save is computed again in front of its first reader in backward, where that is all that
keeps it alive. Values in checkpointed regions are recomputed because the partitioner says so.

Private torch API, seen in 2.11 to 2.14: ``min_cut_rematerialization_partition`` and its rule that
placeholders with "tangents" in their name belong to backward; ``config.cse``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from mpcompile.graph import nodes

_CREATIONS = frozenset(f"aten.{op}" for op in ("ones_like", "full_like", "full", "ones"))


def rematerialise(gm: GraphModule) -> int:
    """Rewrite ``gm``, a flat graph of forward and backward, in place.

    Returns:
        how many values are computed again. Zero if there is no backward in the graph, or if the
        graph is a joint one, which gets partitioned.
    """
    tagged = _backward_nodes(gm.graph)
    if not tagged or any(map(_is_tangent, gm.graph.find_nodes(op="placeholder"))):
        return 0
    seeds = _find_seeds(gm.graph, tagged)
    backward = _dependents(gm.graph, seeds)
    kept = _saved_names(gm, seeds, backward)
    copies = _Copies(gm.graph, backward, kept)
    region = 0
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output") or _writes(node):
            continue
        if node not in backward:
            region += node not in tagged
            continue
        for source in node.all_input_nodes if node not in seeds else ():
            node.replace_input_with(source, copies.of(source, node, region))
    _erase_unread(gm.graph)
    gm.recompile()
    return copies.count


def saved_values(graph: Graph) -> set[Node]:
    """Return the values whose memory the backward of a flat graph reads from its forward."""
    backward = _backward_nodes(graph)
    readers = [node for node in backward if nodes.op_name(node) not in _CREATIONS]  # read a shape
    read = {source for node in readers for source in node.all_input_nodes} - backward
    return {root for root in map(nodes.root, read) if root.op == "call_function"}


def _backward_nodes(graph: Graph) -> set[Node]:
    """Return what backward made and what is computed from it, writes to inputs left out."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or _writes(node):
            continue
        if nodes.is_backward(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_tangent(node: Node) -> bool:
    return "tangents" in str(node.target)


def _writes(node: Node) -> bool:
    """Whether ``node`` copies a value into an input: AOTAutograd puts these at the end."""
    return node.target is torch.ops.aten.copy_.default


class _Copies:
    """Values that are computed again, once for each stretch of backward."""

    def __init__(self, graph: Graph, backward: set[Node], kept: set[str]) -> None:
        self._graph, self._backward, self._kept = graph, backward, kept
        self._made: dict[tuple[Node, int], Node] = {}
        self.count = 0

    def of(self, node: Node, reader: Node, region: int) -> Node:
        """Return what ``reader`` in stretch ``region`` reads for ``node``."""
        if not self._recomputes(node):
            return node
        made = self._made.get((node, region))
        if made is None:
            sources = {s: self.of(s, reader, region) for s in node.all_input_nodes}
            with self._graph.inserting_before(reader):
                made = self._graph.node_copy(node, lambda source: sources[source])
            made.meta = {**node.meta, "autograd_backward": True}
            made.meta.pop("recompute", None)
            self._made[node, region] = made
            self.count += 1
        return made

    def _recomputes(self, node: Node) -> bool:
        if node.op != "call_function" or node in self._backward or node.name in self._kept:
            return False
        if nodes.draws_random(node) or node.is_impure() or _is_number(node):
            return False
        return node.meta.get("recompute") is not None or not _is_product(node)


def _is_number(node: Node) -> bool:
    """Whether ``node`` is no tensor: nothing is gained, and ``item()`` gives a symbol once."""
    return isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymInt, torch.SymBool))


def _is_product(node: Node) -> bool:
    """Whether ``node`` costs arithmetic: only checkpointing has it computed again.

    With several backwards in a graph the partitioner's cut does not fit each of them exactly.
    """
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry


def _find_seeds(graph: Graph, tagged: set[Node]) -> list[Node]:
    """Return where gradients start: ones in the shape of a loss, or what the user handed in.

    Other nodes of backward that read nothing of backward (the cast of an activation, say) could as
    well be forward, and are for the partitioner to save or not.
    """
    first = [n for n in graph.nodes if n in tagged and not tagged & set(n.all_input_nodes)]
    created = [node for node in first if nodes.op_name(node) in _CREATIONS]
    return created or first[:1]


def _dependents(graph: Graph, seeds: list[Node]) -> set[Node]:
    """Return ``seeds`` and what is computed from them, writes to inputs left out."""
    found = set(seeds)
    for node in graph.nodes:
        if node.op == "call_function" and not _writes(node) and found & set(node.all_input_nodes):
            found.add(node)
    return found


def _saved_names(gm: GraphModule, seeds: list[Node], backward: set[Node]) -> set[str]:
    """Return the names of the forward values that the partitioner would save or return."""
    joint, returned = _joint_graph(gm, seeds, backward)
    with torch._functorch.config.patch(cse=False):
        _, second = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=len(returned))
    return {node.name for node in second.graph.find_nodes(op="placeholder")} | returned


def _joint_graph(
    gm: GraphModule, seeds: list[Node], backward: set[Node]
) -> tuple[GraphModule, set[str]]:
    """Copy ``gm`` as a joint graph: seeds are placeholders, forward's outputs come first.

    Also returns the names of forward's outputs.
    """
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    for position, node in enumerate(seeds):
        copies[node] = graph.placeholder(f"tangents_{position + 1}")
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and node not in copies and not _writes(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = list(dict.fromkeys(_results(gm.graph)))
    first = [node for node in results if node not in backward]
    second = [node for node in results if node in backward]
    graph.output(tuple(copies[node] for node in (*first, *second)))
    graph.output_node().meta = {}
    return GraphModule(gm, graph), {node.name for node in first}


def _results(graph: Graph) -> Iterable[Node]:
    """Yield what the graph returns and what it writes into inputs."""
    values = cast(Any, graph.output_node().args[0])
    yield from (v for v in values if isinstance(v, Node) and not _writes(v))
    for node in graph.nodes:
        if _writes(node):
            yield cast(Node, node.args[1])


def _erase_unread(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
