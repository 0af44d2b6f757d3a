"""Fold casts that cannot change a value.

f16 -> f32 -> f16 is exact, as every 16-bit float is a float32: dropped. f32 -> f16 -> f32 rounds:
kept. A narrowing cast behind data movement moves in front of it, where the casts of all views of a
weight, forward and backward, become one; equal casts are merged. A gradient that only an update
reads needs no widening: the update reads 16 bits and computes in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule, Node

from mpcompile.graph import nodes
from mpcompile.graph.gradients import private_outputs
from mpcompile.pass_base import GraphPass, PassContext, Stage

_FULL_VIEWS = frozenset(
    f"aten.{op}"
    for op in """view _unsafe_view reshape permute t transpose unsqueeze squeeze expand detach
    alias""".split()
)


@dataclass(frozen=True)
class FoldCasts(GraphPass):
    """Remove casts that are undone, repeated, or better placed in front of a view.

    Requires: functional ATen graph with ``meta["val"]`` on every node.
    Ensures: same values bit for bit; never more nodes than before.
    """

    name: ClassVar[str] = "fold-casts"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = True
    runs_after: ClassVar[tuple[str, ...]] = ("insert-casts",)
    off: ClassVar[str] = "more casts"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of casts folded."""
        count = 0
        while folded := _fold_once(gm.graph):  # a merge may leave a view with one reader
            count += folded
        return count + _drop_private_widenings(gm.graph)


def _fold_once(graph: Graph) -> int:
    count = 0
    pending = [node for node in graph.nodes if nodes.is_cast(node)]
    while pending:
        moved = [node for node in pending if _match_behind_view(node)]
        for node in moved:
            _move_before_view(node)
        count += len(moved)
        pending = moved
    return count + _drop_round_trips(graph) + _merge_equal(graph)


def _match_behind_view(node: Node) -> bool:
    """A narrowing cast, the only reader of a view that shows all of a dense value."""
    (view,) = nodes.input_nodes(node)
    if nodes.op_name(view) not in _FULL_VIEWS or len(view.users) != 1:
        return False
    if not nodes.is_half(node) or not nodes.is_f32(view):
        return False
    (source, *others) = nodes.input_nodes(view)
    return not others and nodes.is_f32(source) and nodes.is_dense(source)


def _move_before_view(node: Node) -> None:
    """``cast(view(x))`` becomes ``view(cast(x))``; ``node`` becomes the cast of x."""
    (view,) = nodes.input_nodes(node)
    (source,) = nodes.input_nodes(view)
    node.replace_all_uses_with(view)
    node.args = (source,)
    view.prepend(node)
    nodes.replace_input(view, source, node)
    nodes.refresh_value(node)
    nodes.refresh_value(view)


def _drop_round_trips(graph: Graph) -> int:
    """Let readers of a narrowed widening read the narrow source; drop casts to the same dtype."""
    folded = []
    for node in graph.nodes:
        if not nodes.is_cast(node):
            continue
        (source,) = nodes.input_nodes(node)
        origin = nodes.input_nodes(source)[0] if nodes.is_cast(source) else source
        if nodes.dtype_of(origin) is nodes.dtype_of(node) and _is_exact(origin, source):
            node.replace_all_uses_with(origin)
            folded.append(node)
    nodes.erase_dead(graph, folded)
    return len(folded)


def _is_exact(origin: Node, through: Node) -> bool:
    """Whether every value of ``origin`` survives being cast to the dtype of ``through``."""
    same_layout = nodes.has_same_strides(nodes.value(origin), nodes.value(through))
    widened = nodes.is_half(origin) and nodes.is_f32(through)
    return same_layout and (origin is through or widened)


def _merge_equal(graph: Graph) -> int:
    """Let all casts of one value to one dtype be the first of them, if it may be saved for all.

    Casts in a checkpointed region are recomputed with it and merge only among themselves.
    """
    first: dict[tuple[object, ...], Node] = {}
    merged = []
    for node in graph.nodes:
        if not nodes.is_cast(node):
            continue
        (source,) = nodes.input_nodes(node)
        region = (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
        kept = first.setdefault((source, nodes.dtype_of(node), *region), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            merged.append(node)
    nodes.erase_dead(graph, merged)
    return len(merged)


def _drop_private_widenings(graph: Graph) -> int:
    """Hand 16-bit gradients to the update as they are."""
    output = graph.output_node()
    private = private_outputs(graph)
    if not private:
        return 0
    (values,) = output.args
    assert isinstance(values, (tuple, list)), "a traced step returns a tuple"
    kept, folded = list(values), list[Node]()
    for index in private:
        node = kept[index]
        if isinstance(node, Node) and nodes.is_cast(node) and nodes.is_f32(node):
            (source,) = nodes.input_nodes(node)
            if nodes.is_half(source) and nodes.has_same_strides(*map(nodes.value, (source, node))):
                kept[index] = source
                folded.append(node)
    output.args = (tuple(kept),)
    nodes.erase_dead(graph, folded)
    return len(folded)
