"""Say what broke a graph where Dynamo can only go back to an earlier line and says nothing of it.

It traces the frame again then, up to the last line that it can resume from, where the graph ends
with the reason ``step_unsupported``. What was found in the first trace takes the place of that,
with the line that it was found at.

Where there is no such line (a break in a ``with`` or in a loop, or in a step of one line, often),
Dynamo gives the frame up: it runs eagerly, and neither a graph nor a log tells. Then the exception
does.

Private torch API, seen in 2.11 to 2.14: ``InstructionTranslatorBase.log_graph_break``, called with
the exception before the second trace; ``OutputGraph.compile_subgraph``; ``GraphCompileReason``;
``ConvertFrameAssert.__call__``, which raises ``Unsupported`` for a frame that is given up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from mpcompile.capture import dynamo_api

_NAMELESS = "step_unsupported"
_local = threading.local()


def _found() -> dict[CodeType, tuple[str, list[Any]]]:
    """Return for each frame that is traced again what was found in it, and Python's stack there."""
    if not hasattr(_local, "found"):
        _local.found = {}
    found: dict[CodeType, tuple[str, list[Any]]] = _local.found
    return found


GivenUp = Callable[[CodeType, str, Sequence[Any]], None]
"""Told of a frame that is given up: its code, why, and Python's stack there."""


def install(note_given_up: GivenUp) -> None:
    """Install this, once."""
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    log: Any = InstructionTranslatorBase.log_graph_break
    compile_subgraph: Any = OutputGraph.compile_subgraph

    def log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        _found()[self.f_code] = (str(exc), dynamo_api.stack_of(exc))
        log(self, code_options, reason, exc)

    def compile_with_reason(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
        found = _found().pop(tx.f_code, None)
        if found is not None and reason.reason == _NAMELESS:
            reason.reason, reason.user_stack = found[0], found[1] or reason.user_stack
        return compile_subgraph(self, tx, reason, *args, **kwargs)

    convert: Any = ConvertFrameAssert.__call__

    @functools.wraps(convert)
    def convert_or_note(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except Unsupported as error:
            text = str(error).partition("\n")[0]
            note_given_up(frame.f_code, text, dynamo_api.stack_of(error))
            raise

    ConvertFrameAssert.__call__ = convert_or_note  # type: ignore[method-assign]
    InstructionTranslatorBase.log_graph_break = log_graph_break  # type: ignore[method-assign]
    OutputGraph.compile_subgraph = compile_with_reason  # type: ignore[method-assign]
