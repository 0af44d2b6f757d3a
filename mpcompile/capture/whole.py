"""A step that Dynamo has traced whole: forward, backward, clipping and update in one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from mpcompile.capture import changing_numbers, dynamo_api
from mpcompile.capture.carried_backward import BackwardCall
from mpcompile.capture.cuts import compile_apart
from mpcompile.capture.program import Unfinished, build_program
from mpcompile.capture.regions import compile_region
from mpcompile.capture.scaling import UpdateReads
from mpcompile.capture.segments import (
    ClipCall,
    NotSplittableError,
    Part,
    Segment,
    UpdateCall,
    check_dense,
    has_calls,
    is_trivial,
    split,
)
from mpcompile.capture.session import Session
from mpcompile.capture.synchronised import begin, restart_in_regions
from mpcompile.lowering import Compiled
from mpcompile.pass_base import Buckets
from mpcompile.runtime import ops


def compile_graph(gm: GraphModule, inputs: Sequence[Any], session: Session) -> Compiled:
    """Compile what Dynamo hands over: a step with its updates, or a region of one.

    Raises:
        CaptureError: an input cannot be handled.
        PassError: a pass cannot rewrite the graph.
    """
    synchronised = begin(gm, session)
    numbers = changing_numbers.free_numbers(gm.graph) if session.keeps_numbers_free() else {}
    changing_numbers.read_once(gm.graph, numbers)
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, inputs, strict=True))
    given |= changing_numbers.stand_ins(gm.graph, numbers)
    try:
        if session.traces_whole():
            check_dense(gm)
        parts = split(gm) if has_calls(gm) else []
        synchronised.check_parts(parts)
        with changing_numbers.staying_free(numbers.values()):
            if not parts:
                region = compile_apart(gm, given, session, synchronised.buckets)
                return synchronised.around(region, session)
            unfinished = Unfinished()
            program, told = _compile_parts(
                gm, parts, given, session, unfinished, synchronised.buckets
            )
            updates = _tell_updates(parts, unfinished)
            program = synchronised.around(program, session, updates)
            session.note_whole_frame()
            session.report.whole.append(told)
            return program
    except NotSplittableError as error:
        restart_in_regions(session, str(error), error.line)
    except changing_numbers.DecidedByValue as error:
        session.leave_numbers_constant()
        dynamo_api.restart_tracing(str(error))


def _compile_parts(
    gm: GraphModule,
    parts: Sequence[Part],
    given: Mapping[Node, Any],
    session: Session,
    unfinished: Unfinished,
    buckets: Buckets,
) -> tuple[Compiled, str]:
    """Compile the segments among ``parts``; return what runs all parts, and what they are."""
    compiled, told = [], []
    for part in parts:
        before = len(session.report.regions)
        compiled.append(
            _compile_segment(part, parts, given, session, unfinished, buckets)
            if isinstance(part, Segment)
            else None
        )
        told += _tell(part, range(before, len(session.report.regions)))
    program = build_program(gm, parts, compiled, session.whole_run_noter(), unfinished)
    return dynamo_api.without_dynamo(program), " > ".join(told)


def _tell_updates(parts: Sequence[Part], unfinished: Unfinished) -> str:
    """Say what updates do to gradients; equal on two ranks that round alike."""
    told = []
    for part in (part for part in parts if not isinstance(part, Segment)):
        name = part.node.name
        num_wired = sum(item is not None for item in unfinished.on_wire.get(name, ()))
        more = f"{num_wired} gradients on the wire, scaled: {name in unfinished.scaled}"
        told.append(f"{_tell(part, range(0))[0]} ({more})")
    return " > ".join(told)


def _tell(part: Part, regions: range) -> list[str]:
    """Say what ``part`` is; nothing of one that was not compiled."""
    if isinstance(part, UpdateCall):
        name = type(ops.find(part.handle).optimizer).__name__
        return [f"{name} update, clipping inside" if part.clips else f"{name} update"]
    if isinstance(part, BackwardCall):
        return ["backward through earlier regions"]
    if isinstance(part, ClipCall):
        return ["clip by value" if part.order is None else "clip by norm"]
    return [f"region {index}" for index in regions]


def _compile_segment(
    segment: Segment,
    parts: Sequence[Part],
    given: Mapping[Node, Any],
    session: Session,
    unfinished: Unfinished,
    buckets: Buckets,
) -> Compiled:
    """Compile ``segment``; one that only renames values runs as it stands.

    ``given`` holds the inputs of the whole graph.

    What is left to updates is added to ``unfinished``, and what it sends to other ranks to
    ``buckets``.
    """
    if is_trivial(segment):
        return segment.gm.forward
    private = _private_outputs(segment, parts)
    outputs = _read_by_updates(segment, parts, private)
    reads = UpdateReads(outputs, unfinished.scaled, unfinished.on_wire)
    values = segment.example_values(given)
    return compile_region(segment.gm, values, session, private, reads, buckets)


def _read_by_updates(
    segment: Segment, parts: Sequence[Part], private: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the outputs that an update reads, for each that reads no others, and alone."""
    positions = {segment.outputs[index]: index for index in private}
    found = {}
    for update in (part for part in parts if isinstance(part, UpdateCall)):
        grads = [grad for grad in update.grads if grad is not None]
        readers = {update.node, *(clip.node for clip in update.clips)}
        is_alone = all(grad in positions and _outside(grad, segment) <= readers for grad in grads)
        if grads and all(update.given) and is_alone:
            found[update.node.name] = tuple(positions[grad] for grad in grads)
    return found


def _private_outputs(segment: Segment, parts: Sequence[Part]) -> list[int]:
    """Return the positions of outputs that only updates and clips inside updates read."""
    updates = [part for part in parts if isinstance(part, UpdateCall)]
    runtime = {update.node for update in updates}
    runtime |= {clip.node for update in updates for clip in update.clips}
    return [
        position
        for position, node in enumerate(segment.outputs)
        if _outside(node, segment) <= runtime
    ]


def _outside(node: Node, segment: Segment) -> set[Node]:
    """Return what reads ``node`` behind ``segment``."""
    return {user for user in node.users if user not in segment.nodes}
