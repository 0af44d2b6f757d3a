"""Functions that Dynamo hands to us instead of tracing them as they are.

Private torch API, seen in 2.11 to 2.14: ``trace_rules._allowed_callable_ids``;
``TorchInGraphFunctionVariable._get_handlers``; ``exc.unimplemented``;
``InstructionTranslator.current_tx``; ``VariableTracker.visit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mpcompile.runtime.stand_ins import is_traced_whole


def handle(function: Any, handler: Callable[..., Any]) -> None:
    """Have Dynamo call ``handler(variable, tx, *args, **kwargs)`` where it meets ``function``."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    trace_rules._allowed_callable_ids.add(id(function))
    TorchInGraphFunctionVariable._get_handlers()[function] = handler


def trace_instead(original: Any, stand_in: Any, applies: Callable[[], bool] = lambda: True) -> None:
    """Have Dynamo trace ``stand_in`` where a step that is traced whole calls ``original``.

    Args:
        original: a Python function that Dynamo would trace.
        stand_in: one that takes the same arguments.
        applies: asked at each call; where False, ``original`` is traced.
    """

    def trace(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.variables.functions import UserFunctionVariable

        is_replaced = is_traced_whole() and applies()
        function = (
            UserFunctionVariable(stand_in)
            if is_replaced
            else UserFunctionVariable(original, source=self.source)
        )
        return function.call_function(tx, list(args), kwargs)

    handle(original, trace)


class WholeTrace(Protocol):
    """What tracing a step whole asks of the session whose step it is."""

    def note_refusal(self, reason: str) -> None:
        """Note why the graph is broken where the trace is now."""


def break_graph(reason: str, context: str, trace: WholeTrace | None = None) -> None:
    """End the graph that is being traced, and have the report of ``trace`` tell why."""
    from torch._dynamo.exc import unimplemented

    if trace is not None:
        trace.note_refusal(reason)
    unimplemented(
        gb_type=f"mpcompile: {reason}",
        context=context,
        explanation="The rest of the step is compiled in regions.",
        hints=[],
    )


def current_tx() -> Any:
    """Return Dynamo's translator of the frame that is being traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


def tensors_in(variables: Sequence[Any]) -> list[Any]:
    """Return the variables of tensors among ``variables``, those in containers included."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    found: list[Any] = []

    def visit(variable: Any) -> None:
        if isinstance(variable, TensorVariable):
            found.append(variable)

    VariableTracker.visit(visit, list(variables))
    return found


def real_tensor(variable: Any) -> torch.Tensor | None:
    """Return the real tensor behind a graph input; a leaf made in the graph has none."""
    example = getattr(variable.as_proxy().node.meta.get("grapharg"), "example", None)
    return example if isinstance(example, torch.Tensor) else None
