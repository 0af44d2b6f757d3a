"""Split Dynamo's graph at the ops that stand for updates and clipping.

What lies between two such ops is a segment, lowered by itself: no compiler sees an optimizer's
state, and what reads a parameter after its update is in a later segment by construction. In each
segment the switches of grad mode balance, and a value that leaves one is detached, or AOTAutograd
would differentiate the segment a second time; it does so only where a later backward goes on
through the value.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mpcompile.capture.carried_backward import (
    BackwardCall,
    cut_crossings,
    has_history,
    is_carried,
    is_result,
    read_carried,
)
from mpcompile.graph.nodes import user_line

SET_GRAD_MODE = torch._C._set_grad_enabled
AUTOCAST = _ENTER, _EXIT = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
_DETACH = "detach"


class NotSplittableError(Exception):
    """The graph cannot be cut at its updates; the text says why, ``line`` where."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.line = user_line(node)


@dataclass(frozen=True)
class ClipCall:
    """``mpcompile::clip_grad_norm_`` or ``clip_grad_value_`` in a graph."""

    node: Node
    grads: tuple[Node, ...]
    bound: Any
    order: float | None = None
    """The order of the norm, or None for values."""


@dataclass(frozen=True)
class UpdateCall:
    """``mpcompile::update`` in a graph.

    Attributes:
        node: the call.
        handle: whose update.
        grads: one for each parameter, in the order of the groups.
        given: where False, the parameter's own ``.grad`` counts instead.
        clips: clipping that happens inside the update, because nothing else sees its result.
    """

    node: Node
    handle: str
    grads: tuple[Node | None, ...]
    given: tuple[bool, ...]
    clips: tuple[ClipCall, ...] = ()


@dataclass
class Segment:
    """A part of the graph that is lowered by itself.

    Attributes:
        gm: the part. Its placeholders stand for ``inputs``, its outputs for ``outputs``.
        inputs: nodes of the whole graph, computed before or handed in.
        outputs: nodes of the whole graph that are read later.
        nodes: its nodes in the whole graph.
        detached: inputs that it gets without their history.
    """

    gm: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    nodes: frozenset[Node]
    detached: frozenset[Node] = frozenset()

    def example_values(self, given: Mapping[Node, Any]) -> list[Any]:
        """Return what it is traced with: ``given``, or fakes that for it come from nowhere."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        return [
            given[node] if node in given else _fake_value(placeholder)
            for node, placeholder in zip(self.inputs, placeholders, strict=True)
        ]


def _fake_value(placeholder: Node) -> Any:
    value = placeholder.meta["example_value"]
    return value.detach().requires_grad_() if has_history(placeholder) else value


Part = Segment | UpdateCall | ClipCall | BackwardCall


def has_calls(gm: GraphModule) -> bool:
    """Whether ``gm`` holds an update or clips gradients."""
    return any(_is_call(node) for node in gm.graph.nodes)


def _is_call(node: Node) -> bool:
    return node.op == "call_function" and node.target in _calls()


def _calls() -> tuple[Any, ...]:
    ops = torch.ops.mpcompile
    return (ops.update.default, *_clips())


def _clips() -> tuple[Any, ...]:
    ops = torch.ops.mpcompile
    return (ops.clip_grad_norm_, ops.clip_grad_norm_.default, ops.clip_grad_value_,
            ops.clip_grad_value_.default)  # fmt: skip


def split(gm: GraphModule) -> list[Part]:
    """Return the parts of ``gm`` in order.

    Raises:
        NotSplittableError: an autocast region spans an update, or a backward that is to be
            differentiated again does; a value leaves the graph that a later backward may go
            through.
    """
    _check_outputs(gm.graph)
    differentiable = _cut_backward(gm.graph)
    parts: list[Part] = []
    block = _Block()
    grad_mode = torch.is_grad_enabled()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or is_result(node):
            continue
        if _is_call(node) or is_carried(node):
            _flush(gm, block, parts, grad_mode, differentiable)
            parts.append(read_carried(node) if is_carried(node) else _read_call(node))
            grad_mode, block = block.mode_after(grad_mode), _Block()
        else:
            block.nodes.append(node)
    _flush(gm, block, parts, grad_mode, differentiable)
    return _merge_clips(parts)


def _cut_backward(graph: Graph) -> frozenset[Node]:
    """Cut backwards that cross an update; return the values that they cross at."""
    stuck = cut_crossings(graph, _is_call)
    if stuck is not None:
        reason = "a backward that is differentiated again goes through values from before an update"
        raise NotSplittableError(reason, stuck)
    calls = [read_carried(node) for node in graph.nodes if is_carried(node)]
    return frozenset(output for call in calls for output in call.outputs)


def check_dense(gm: GraphModule) -> None:
    """Refuse a graph that computes sparse gradients: no compiler takes them.

    Raises:
        NotSplittableError: there is one.
    """
    backward = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    for node in gm.graph.nodes if backward else ():
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise NotSplittableError("a gradient is sparse", node)


def _check_outputs(graph: Graph) -> None:
    for node in graph.output_node().all_input_nodes:
        if has_history(node):
            reason = "a value leaves the step that a later backward may go through"
            raise NotSplittableError(reason, node)


@dataclass
class _Block:
    """The nodes between two calls."""

    nodes: list[Node] = field(default_factory=list)

    def mode_after(self, before: bool) -> bool:
        """Return grad mode at the end."""
        modes = [bool(node.args[0]) for node in self.nodes if node.target is SET_GRAD_MODE]
        return modes[-1] if modes else before

    def computes(self) -> bool:
        return any(node.target is not SET_GRAD_MODE for node in self.nodes)


def _read_call(node: Node) -> UpdateCall | ClipCall:
    args: tuple[Any, ...] = node.args
    if node.target is torch.ops.mpcompile.update.default:
        return UpdateCall(node, args[0], tuple(args[1]), tuple(args[2]))
    order = float(args[2]) if len(args) > 2 else None
    return ClipCall(node, tuple(args[0]), args[1], order)


def _flush(
    gm: GraphModule,
    block: _Block,
    parts: list[Part],
    mode: bool,
    differentiable: frozenset[Node],
) -> None:
    """Make a segment of ``block``, which starts in grad mode ``mode``.

    What leaves it is detached, unless it is one of ``differentiable``.
    """
    if not block.computes():
        return
    _check_autocast(block.nodes)
    modes = (mode, block.mode_after(mode))
    parts.append(build_segment(gm, block.nodes, modes, differentiable))


def build_segment(
    gm: GraphModule,
    nodes: Sequence[Node],
    modes: tuple[bool, bool],
    differentiable: Collection[Node],
    detached: Collection[Node] = (),
) -> Segment:
    """Return the segment of ``nodes``, which follow one another in ``gm``.

    Args:
        gm: the whole graph.
        nodes: a part of it.
        modes: the grad modes in which they begin and end.
        differentiable: what leaves the segment with its history.
        detached: what it gets without its history.
    """
    mine = set(nodes)
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in mine))
    outputs = tuple(n for n in nodes if any(user not in mine for user in n.users))
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if node in detached:
            copies[node].meta["example_value"] = node.meta["example_value"].detach()
    ambient = torch.is_grad_enabled()
    if modes[0] != ambient:
        graph.call_function(SET_GRAD_MODE, (modes[0],))
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if modes[1] != ambient:
        graph.call_function(SET_GRAD_MODE, (ambient,))
    graph.output(
        tuple(copies[n] if n in differentiable else _detached(graph, copies[n]) for n in outputs)
    )
    part = GraphModule(gm, graph)
    part.meta = {key: value for key, value in gm.meta.items() if key != "dynamo_compile_id"}
    return Segment(part, inputs, outputs, frozenset(mine), frozenset(detached))


def _detached(graph: Graph, node: Node) -> Node:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not value.requires_grad:
        return node
    made = graph.call_method(_DETACH, (node,))
    made.meta = {**node.meta, "example_value": value.detach()}
    return made


def _check_autocast(block: Sequence[Node]) -> None:
    entered = [node for node in block if node.target is _ENTER]
    left = [node.args[0] for node in block if node.target is _EXIT]
    if set(entered) != set(left):
        reason = "the optimizer's step lies inside an autocast region"
        raise NotSplittableError(reason, block[0])


def _merge_clips(parts: Sequence[Part]) -> list[Part]:
    """Move clips whose result only the next update sees into that update."""
    merged: list[Part] = []
    waiting: list[ClipCall] = []
    for index, part in enumerate(parts):
        if isinstance(part, ClipCall) and _is_private(part, parts[index + 1 :]):
            waiting.append(part)
        elif isinstance(part, UpdateCall):
            merged.append(replace(part, clips=tuple(waiting)))
            waiting = []
        else:
            merged.append(part)
    return merged


def _is_private(clip: ClipCall, later: Sequence[Part]) -> bool:
    """Whether the gradients of ``clip`` are seen by nothing but the update that follows at once."""
    between = list(itertools.takewhile(lambda part: isinstance(part, ClipCall), later))
    update = later[len(between)] if len(between) < len(later) else None
    if not isinstance(update, UpdateCall):
        return False
    clips = [part for part in (clip, *between) if isinstance(part, ClipCall)]
    if clip.order is not None and any(other.order is not None for other in clips[1:]):
        return False  # an update tells of one norm only
    mine = set(clip.grads)
    if any(set(other.grads) != mine for other in clips) or mine != set(update.grads) - {None}:
        return False
    allowed = {update.node, *(other.node for other in clips)}
    before = set(itertools.takewhile(lambda node: node is not clip.node, clip.node.graph.nodes))
    if any(grad.op == "placeholder" for grad in clip.grads):
        return False  # the user's own tensor
    return all(set(grad.users) - before <= allowed for grad in clip.grads)


def is_trivial(segment: Segment) -> bool:
    """Whether ``segment`` only detaches values: nothing to compile."""
    calls = [n for n in segment.gm.graph.nodes if n.op not in ("placeholder", "output")]
    return all(node.op == "call_method" and node.target == _DETACH for node in calls)
