"""Run the parts of a step one after the other: compiled segments, updates, clipping.

A value is dropped after the part that reads it last, so gradients die at the update. Clipping that
nothing but the next update sees happens inside the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.fx import GraphModule, Node

from mpcompile.capture.segments import ClipCall, Part, Segment, UpdateCall
from mpcompile.runtime import ops
from mpcompile.runtime.grads import ClipNorm, ClipValue, GradPlan

Env = list[Any]
Action = Callable[[Env], None]


@dataclass(frozen=True)
class _Slots:
    """Where each value of the graph lives while the program runs."""

    of: dict[Node, int]

    def many(self, nodes: Sequence[Node | None]) -> list[int | None]:
        """Return the slots of ``nodes``; None stays None."""
        return [None if node is None else self.of[node] for node in nodes]


def build_program(
    gm: GraphModule, parts: Sequence[Part], compiled: Sequence[Callable[..., Any] | None]
) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the inputs of ``gm`` that returns its outputs.

    Args:
        gm: the whole graph.
        parts: what it was split into.
        compiled: for each part that is a segment, what runs it.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    slots = _Slots({node: index for index, node in enumerate(gm.graph.nodes)})
    (result,) = gm.graph.output_node().args
    steps = _merge_clips(parts, compiled, gm)
    actions = [action(slots) for action, _ in steps]
    dead = _last_reads([reads for _, reads in steps], result, slots)
    size, num_inputs = len(slots.of), len(placeholders)
    results = slots.many(result)  # type: ignore[arg-type]  # Dynamo's output is a tuple of nodes

    def run(*args: Any) -> tuple[Any, ...]:
        env: Env = [None] * size
        env[:num_inputs] = args
        for action, drop in zip(actions, dead, strict=True):
            action(env)
            for slot in drop:
                env[slot] = None
        return tuple(None if slot is None else env[slot] for slot in results)

    return run


Step = tuple[Callable[[_Slots], Action], Sequence[Node]]


def _merge_clips(
    parts: Sequence[Part], compiled: Sequence[Callable[..., Any] | None], gm: GraphModule
) -> list[Step]:
    """Turn parts into steps; clips that only the update behind them sees go into the update."""
    steps: list[Step] = []
    waiting: list[ClipCall] = []
    for index, (part, function) in enumerate(zip(parts, compiled, strict=True)):
        if isinstance(part, ClipCall):
            if _is_private(part, parts[index + 1 :]):
                waiting.append(part)
            else:
                steps.append((_clip_step(part), part.grads))
        elif isinstance(part, UpdateCall):
            reads = [grad for grad in part.grads if grad is not None]
            steps.append((_update_step(part, waiting), reads))
            waiting = []
        else:
            assert function is not None
            steps.append((_segment_step(part, function), part.inputs))
    return steps


def _is_private(clip: ClipCall, later: Sequence[Part]) -> bool:
    """Whether the gradients of ``clip`` are seen by nothing but the update that follows at once."""
    update = next((part for part in later if not isinstance(part, ClipCall)), None)
    if not isinstance(update, UpdateCall):
        return False
    between = later[: list(later).index(update)]
    if clip.order is not None and any(p.order is not None for p in between if _is_clip(p)):
        return False  # an update tells of one norm only
    if any(set(part.grads) != set(clip.grads) for part in between if _is_clip(part)):
        return False
    if {grad for grad in update.grads if grad is not None} != set(clip.grads):
        return False
    allowed = {clip.node, update.node, *(p.node for p in between if _is_clip(p))}
    return all(set(_readers_after(grad, clip.node)) <= allowed for grad in clip.grads)


def _is_clip(part: Part) -> TypeGuard[ClipCall]:
    return isinstance(part, ClipCall)


def _readers_after(grad: Node, call: Node) -> list[Node]:
    """Return what reads ``grad`` from ``call`` on; a graph input is seen by the user as well."""
    order = {node: index for index, node in enumerate(grad.graph.nodes)}
    readers = [user for user in grad.users if order[user] >= order[call]]
    return [*readers, grad] if grad.op == "placeholder" else readers


def _segment_step(segment: Segment, function: Callable[..., Any]) -> Callable[[_Slots], Action]:
    def bind(slots: _Slots) -> Action:
        inputs = [slots.of[node] for node in segment.inputs]
        outputs = [slots.of[node] for node in segment.outputs]

        def run(env: Env) -> None:
            found = function(*[env[slot] for slot in inputs])
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


def _update_step(update: UpdateCall, clips: Sequence[ClipCall]) -> Callable[[_Slots], Action]:
    merged = tuple(clips)

    def bind(slots: _Slots) -> Action:
        grads = slots.many(update.grads)
        bounds = [_reader(clip.bound, slots) for clip in merged]
        norms = [slots.of[clip.node] for clip in merged if clip.order is not None]

        def run(env: Env) -> None:
            plan = None
            if merged:
                plan = GradPlan(
                    clips=tuple(
                        ClipValue(bound(env))
                        if clip.order is None
                        else ClipNorm(bound(env), clip.order)
                        for clip, bound in zip(merged, bounds, strict=True)
                    )
                )
            mine = [None if slot is None else env[slot] for slot in grads]
            outcome = ops.run_update(update.handle, mine, update.given, plan)
            for slot in norms:
                env[slot] = outcome.norm

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
