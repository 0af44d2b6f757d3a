"""The backend that ``torch.compile(step, backend="mpcompile")`` finds, and what inspects it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mpcompile.capture import dynamo_api, patches
from mpcompile.capture.session import Session, build_context, current_session, session_of
from mpcompile.capture.snapshot import restored
from mpcompile.capture.whole import compile_graph
from mpcompile.config import Config, is_disabled
from mpcompile.errors import CaptureError, ConfigError
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
    return compile_graph(gm, example_inputs, session)


def explain(
    step: Any, *args: Any, options: Mapping[str, object] | None = None, **kwargs: Any
) -> StepReport:
    """Run ``step(*args, **kwargs)`` once, undo what it did, and return what was done to its graphs.

    Parameters, buffers, gradients, optimizer state, random state and the Python state that the step
    reaches are as before afterwards. The graphs are run op by op (``lowering="eager"``), so no
    kernel is generated; they are the ones that Inductor would get. In float16 the report names the
    node that gave the first Inf or NaN, if one did.

    Args:
        step: the plain step, or what ``torch.compile`` returned for it.
        *args: arguments of the step.
        options: as for ``torch.compile``; by default those that ``step`` was compiled with.
        **kwargs: keyword arguments of the step.

    Raises:
        ConfigError: wrong options.
        CaptureError: an input that cannot be handled.
        PassError: a graph that a pass cannot rewrite.
    """
    known = session_of(step)
    config = Config.from_options(options) if options is not None or known is None else known.config
    session = Session(dataclasses.replace(config, lowering="eager"))
    if session.loss_scale is not None:
        session.watches_overflow, session.loss_scale.tells_of_trouble = True, False
        if known is not None and known.loss_scale is not None:
            session.loss_scale.load_state_dict(known.loss_scale.state_dict())
    original = dynamo_api.original_of(step)
    compiled: Any = torch.compile(original, backend=functools.partial(_compile_for, session))
    with restored(original, args, kwargs), session.running():
        compiled(*args, **kwargs)
    if session.loss_scale is not None:
        session.report.loss_scale = session.loss_scale.record()
    return session.report


def _compile_for(session: Session, gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
    return compile_graph(gm, inputs, session)


def last_report(step: Any) -> StepReport:
    """Return what was done to ``step`` so far.

    Args:
        step: what ``torch.compile(..., backend="mpcompile")`` returned.

    Raises:
        CaptureError: ``step`` was not compiled with this backend.
    """
    session = _session("last_report", step)
    if session.loss_scale is not None:
        session.report.loss_scale = session.loss_scale.record()
    return session.report


def skipped(step: Any) -> torch.Tensor:
    """Return whether the last step was skipped because its gradients overflowed in float16.

    It is a tensor of one bool on the device of the step; nothing waits for the device until it is
    read. Gate a learning-rate schedule with it, or an optimizer that is not part of the step.

    Args:
        step: what ``torch.compile(..., backend="mpcompile")`` returned.

    Raises:
        CaptureError: ``step`` was not compiled with this backend.
    """
    scale = _session("skipped", step).loss_scale
    return torch.zeros((), dtype=torch.bool) if scale is None else scale.skipped()


def state_dict(step: Any) -> dict[str, Any]:
    """Return what a checkpoint needs beside model and optimizer, as numbers and CPU tensors.

    That is the loss scale, equal on all ranks, and with ``error_feedback`` what this rank owes to
    the next gradients: save it on every rank, and load each on its own.

    Args:
        step: what ``torch.compile(..., backend="mpcompile")`` returned.

    Raises:
        CaptureError: ``step`` was not compiled with this backend.
    """
    session = _session("state_dict", step)
    session.updates.settle()
    scale = session.loss_scale
    return {
        "loss_scale": {} if scale is None else scale.state_dict(),
        "sync": session.sync.state_dict(),
    }


def load_state_dict(step: Any, state: Mapping[str, Any]) -> None:
    """Take over what ``state_dict`` returned, in this or another process.

    A step that does not scale its loss ignores its scale, and one without ``error_feedback`` what
    ranks owe, so options may change between runs.

    Args:
        step: what ``torch.compile(..., backend="mpcompile")`` returned.
        state: what ``state_dict`` returned.

    Raises:
        CaptureError: ``step`` was not compiled with this backend.
        ConfigError: ``state`` is something else.
    """
    session = _session("load_state_dict", step)
    if not {"loss_scale", "sync"} <= state.keys():
        raise ConfigError(
            f"load_state_dict: found the entries {', '.join(map(str, state)) or 'none'}, expected "
            "loss_scale and sync. Load what mpcompile.state_dict(step) returned; model and "
            "optimizer have state dicts of their own."
        )
    if session.loss_scale is not None:
        session.loss_scale.load_state_dict(state["loss_scale"])
    session.sync.load_state_dict(state["sync"])


def _session(caller: str, step: Any) -> Session:
    session = session_of(step)
    if session is None:
        name = getattr(step, "__qualname__", None) or type(step).__name__
        raise CaptureError(
            f"{caller}: {name} is not what torch.compile(..., backend='mpcompile') returned, so "
            "nothing is known of it. Pass the compiled step itself, not the function in it."
        )
    return session


patches.install()
dynamo_api.install_context(build_context, lambda function: function is mpcompile)
