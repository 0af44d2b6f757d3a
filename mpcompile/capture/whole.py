"""A step that Dynamo has traced whole: forward, backward, clipping and update in one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from mpcompile.capture import dynamo_api
from mpcompile.capture.program import build_program
from mpcompile.capture.regions import compile_region
from mpcompile.capture.segments import NotSplittableError, Segment, has_calls, split
from mpcompile.capture.session import Session
from mpcompile.lowering import Compiled


def compile_graph(gm: GraphModule, inputs: Sequence[Any], session: Session) -> Compiled:
    """Compile what Dynamo hands over: a step with its updates, or a region of one.

    Raises:
        CaptureError: an input cannot be handled.
        PassError: a pass cannot rewrite the graph.
    """
    if not has_calls(gm):
        return compile_region(gm, inputs, session)
    try:
        parts = split(gm)
    except NotSplittableError as error:
        session.report.add_break(f"not captured whole: {error}", "")
        session.leave_to_regions()
        dynamo_api.restart_tracing(str(error))
    compiled: list[Callable[..., Any] | None] = [
        compile_region(part.gm, _example_values(part), session)
        if isinstance(part, Segment)
        else None
        for part in parts
    ]
    return dynamo_api.without_dynamo(build_program(gm, parts, compiled))


def _example_values(segment: Segment) -> list[Any]:
    """Return the fake inputs that ``segment`` is traced with."""
    return [node.meta["example_value"] for node in segment.inputs]
