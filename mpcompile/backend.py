"""The backend that ``torch.compile(step, backend="mpcompile")`` finds, and what inspects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from mpcompile.capture import dynamo_api
from mpcompile.capture.regions import compile_region
from mpcompile.capture.session import Session, build_context, current_session, session_of
from mpcompile.config import Config, is_disabled
from mpcompile.errors import CaptureError
from mpcompile.inspection.report import StepReport
from mpcompile.lowering import Compiled, lower_stock


def mpcompile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Compiled:
    """Compile one graph of a training step; called by Dynamo.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, fake or real.
        mode: as ``torch.compile(mode=...)``.
        options: see ``mpcompile.config.option_rows``.

    Raises:
        ConfigError: wrong options.
        CaptureError: an input that cannot be handled.
        PassError: a graph that a pass cannot rewrite.
    """
    if is_disabled():
        return lower_stock(gm, example_inputs, mode)
    session = current_session()
    if session is None:  # called by hand, outside torch.compile
        session = Session(Config.from_options(options, mode))
    return compile_region(gm, example_inputs, session)


def last_report(step: Any) -> StepReport:
    """Return what was done to ``step`` so far.

    Args:
        step: what ``torch.compile(..., backend="mpcompile")`` returned.

    Raises:
        CaptureError: ``step`` was not compiled with this backend.
    """
    session = session_of(step)
    if session is None:
        name = getattr(step, "__qualname__", None) or type(step).__name__
        raise CaptureError(
            f"last_report: {name} is not what torch.compile(..., backend='mpcompile') returned, so "
            "there is nothing to report. Pass the compiled step itself, not the function in it."
        )
    return session.report


dynamo_api.install_context(build_context, lambda function: function is mpcompile)
