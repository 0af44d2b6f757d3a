"""Put into torch and Dynamo what asks us; each question goes to the session of its thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from mpcompile.capture import (
    break_reasons,
    class_state,
    dropped_grads,
    dynamo_api,
    dynamo_ddp,
    dynamo_updates,
    dynamo_variables,
    hooks,
    remedies,
    second_try,
    user_warnings,
)
from mpcompile.capture.session import Session, current_session
from mpcompile.runtime import stand_ins


def install() -> None:
    """Install all of it, once. Without a session it does what torch does."""
    hooks.install()
    dynamo_variables.install(_whole_trace, _is_left_to_regions)
    dynamo_updates.install(_whole_trace)
    break_reasons.install(_note_given_up)
    user_warnings.install(_has_session)
    class_state.install(_has_session)
    second_try.install(_has_session, _note_refusal)
    dropped_grads.install(_drop_later)
    dynamo_ddp.install(_whole_trace)
    stand_ins.install(lambda: _whole_trace() is not None)
    remedies.install()


def _has_session() -> bool:
    return current_session() is not None


def _whole_trace() -> Session | None:
    """Return the session whose step is being traced whole in this thread, or None."""
    session = current_session()
    return session if session is not None and session.traces_whole() else None


def _is_left_to_regions() -> bool:
    """Whether the function that is being traced in this thread was found not to be one graph."""
    session = current_session()
    return session is not None and session.is_left_to_regions()


def _drop_later() -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Return what takes parameters whose gradients go when the call ends; None keeps them."""
    session = _whole_trace()
    return None if session is None or session.drops is None else session.drop_later


def _note_given_up(code: CodeType, reason: str, stack: Sequence[Any]) -> None:
    session, found = current_session(), dynamo_api.given_up(code, reason, stack)
    if session is not None and found is not None:
        session.note_given_up(found)


def _note_refusal(reason: str, stack: Sequence[Any]) -> None:
    if (session := current_session()) is not None:
        session.note_refusal(reason, stack)
