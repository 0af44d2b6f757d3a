"""Run the parts of a step one after the other: segments, updates, clipping, carried backward.

A value is dropped after the part that reads it last, so gradients die at the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from mpcompile.capture.carried_backward import BackwardCall, run_carried
from mpcompile.capture.segments import ClipCall, Part, Segment, UpdateCall
from mpcompile.distributed import graph_ops
from mpcompile.distributed.plan import SumOnWire
from mpcompile.runtime import ops
from mpcompile.runtime.grads import ClipNorm, ClipValue, GradPlan

Env = list[Any]
Action = Callable[[Env], None]


@dataclass(frozen=True)
class Unfinished:
    """What updates have yet to do to the gradients that they get, by name of the update.

    Attributes:
        scaled: undo the loss scale.
        on_wire: complete the mean of those that are sums on the wire, in the order of the update.
    """

    scaled: set[str] = field(default_factory=set)
    on_wire: dict[str, tuple[SumOnWire | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slots:
    """Where each value of the graph lives while the program runs."""

    of: dict[Node, int]

    def many(self, nodes: Sequence[Node | None]) -> list[int | None]:
        """Return the slots of ``nodes``; None stays None."""
        return [None if node is None else self.of[node] for node in nodes]


def build_program(
    gm: GraphModule,
    parts: Sequence[Part],
    compiled: Sequence[Callable[..., Any] | None],
    note_run: Callable[[], None],
    unfinished: Unfinished | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the inputs of ``gm`` that returns its outputs.

    Args:
        gm: the whole graph.
        parts: what it was split into.
        compiled: for each part that is a segment, what runs it.
        note_run: called whenever the program runs.
        unfinished: what updates have yet to do to their gradients.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    slots = _Slots({node: index for index, node in enumerate(gm.graph.nodes)})
    result: Sequence[Node | None] = gm.graph.output_node().args[0]  # type: ignore[assignment]
    unfinished = unfinished or Unfinished()
    steps = [_step_of(*item, unfinished) for item in zip(parts, compiled, strict=True)]
    actions = [action(slots) for action, _ in steps]
    dead = _last_reads([reads for _, reads in steps], result, slots)
    size, num_inputs = len(slots.of), len(placeholders)
    results = slots.many(result)

    def run(*args: Any) -> tuple[Any, ...]:
        note_run()
        env: Env = [None] * size
        env[:num_inputs] = args
        for action, drop in zip(actions, dead, strict=True):
            action(env)
            for slot in drop:
                env[slot] = None
        return tuple(None if slot is None else env[slot] for slot in results)

    return run


Step = tuple[Callable[[_Slots], Action], Sequence[Node]]


def _step_of(part: Part, function: Callable[..., Any] | None, unfinished: Unfinished) -> Step:
    """Return what builds the action of ``part``, and the values that it reads."""
    if isinstance(part, ClipCall):
        return _clip_step(part), part.grads
    if isinstance(part, UpdateCall):
        name = part.node.name
        step = _update_step(part, name in unfinished.scaled, unfinished.on_wire.get(name, ()))
        return step, [grad for grad in part.grads if grad is not None]
    if isinstance(part, BackwardCall):
        return _backward_step(part), part.reads
    assert function is not None, "segments are compiled"
    return _segment_step(part, function), part.inputs


def _segment_step(segment: Segment, function: Callable[..., Any]) -> Callable[[_Slots], Action]:
    def bind(slots: _Slots) -> Action:
        inputs = [slots.of[node] for node in segment.inputs]
        outputs = [slots.of[node] for node in segment.outputs]
        detached = [i for i, node in enumerate(segment.inputs) if node in segment.detached]

        def run(env: Env) -> None:
            given = [env[slot] for slot in inputs]
            for position in detached:
                given[position] = given[position].detach()
            found = function(*given)
            for slot, value in zip(outputs, found, strict=True):
                env[slot] = value

        return run

    return bind


def _clip_step(clip: ClipCall) -> Callable[[_Slots], Action]:
    def bind(slots: _Slots) -> Action:
        grads = [slots.of[node] for node in clip.grads]
        bound, total = _reader(clip.bound, slots), slots.of[clip.node]

        def run(env: Env) -> None:
            mine = [env[slot] for slot in grads]
            if clip.order is None:
                ops.clip_grad_value(mine, bound(env))
            else:
                env[total] = ops.clip_grad_norm(mine, bound(env), clip.order)

        return run

    return bind


def _reader(value: Any, slots: _Slots) -> Callable[[Env], float]:
    """Return what reads a number that may be a value of the graph."""
    if isinstance(value, Node):
        slot = slots.of[value]
        return lambda env: float(env[slot])
    number = float(value)
    return lambda env: number


def _update_step(
    update: UpdateCall, is_scaled: bool, on_wire: Sequence[SumOnWire | None]
) -> Callable[[_Slots], Action]:
    clips = update.clips
    sums = list(dict.fromkeys(on_wire))
    places = [sums.index(item) for item in on_wire]

    def bind(slots: _Slots) -> Action:
        grads = slots.many(update.grads)
        bounds = [_reader(clip.bound, slots) for clip in clips]
        norms = [slots.of[clip.node] for clip in clips if clip.order is not None]

        def run(env: Env) -> None:
            bound = [read(env) for read in bounds]
            plan = GradPlan(clips=tuple(map(_planned, clips, bound))) if clips else None
            mine = [None if slot is None else env[slot] for slot in grads]
            factor_of = graph_ops.mean_factors(sums)
            factors = [factor_of[place] for place in places]
            outcome = ops.run_update(update.handle, mine, update.given, plan, is_scaled, factors)
            for slot in norms:
                env[slot] = outcome.norm

        return run

    return bind


def _planned(clip: ClipCall, bound: float) -> ClipNorm | ClipValue:
    return ClipValue(bound) if clip.order is None else ClipNorm(bound, clip.order)


def _backward_step(call: BackwardCall) -> Callable[[_Slots], Action]:
    def bind(slots: _Slots) -> Action:
        groups = (call.outputs, call.inputs, call.direct, call.cotangents)
        read = [[slots.of[node] for node in group] for group in groups]
        results = slots.many(call.results)

        def run(env: Env) -> None:
            outputs, inputs, direct, cotangents = ([env[slot] for slot in group] for group in read)
            found = run_carried(outputs, inputs, direct, cotangents, call.is_last)
            for slot, grad in zip(results, found, strict=True):
                if slot is not None:
                    env[slot] = grad

        return run

    return bind


def _last_reads(
    reads: Sequence[Sequence[Node]], result: Sequence[Node | None], slots: _Slots
) -> list[list[int]]:
    """Return for each step the slots that nothing reads after it."""
    kept = {node for node in result if node is not None}
    last: dict[Node, int] = {}
    for index, nodes in enumerate(reads):
        for node in nodes:
            last[node] = index
    dead: list[list[int]] = [[] for _ in reads]
    for node, index in last.items():
        if node not in kept:
            dead[index].append(slots.of[node])
    return dead
