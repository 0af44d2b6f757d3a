"""``grads="drop"``: a step that clears gradients first leaves none behind, as if it did so last.

Only where eager could not tell in the next step: the step itself must have set ``.grad`` to None in
front of the backward that the update reads. What came in from an earlier call, or was None by
chance, is kept. Until the graph ends a gradient is what it is in eager, so that reading it behind
the update, adding to it or updating from it twice stays right; a gradient that nothing reads there
dies at the update and is nothing but an input of it, in 16 bits.

Private torch API, seen in 2.11 to 2.14: ``OutputGraph.compile_subgraph``; ``SideEffects``:
``id_to_variable``, ``has_pending_mutation_of_attr``, ``load_attr``, ``store_attr``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class _Traced:
    """What the graph that is being traced has done so far, by identity of the parameter."""

    cleared: set[int] = field(default_factory=set)
    updated: dict[int, torch.Tensor] = field(default_factory=dict)


def _traced(graph: Any) -> _Traced:
    found: _Traced = vars(graph).setdefault("_mpcompile_grads", _Traced())
    return found


def note_backward(graph: Any, params: Iterable[torch.Tensor]) -> None:
    """Note which of ``params`` the step has cleared, in front of a backward to them."""
    effects = graph.side_effects
    for param in params:
        if _is_none(_pending(effects, param)):
            _traced(graph).cleared.add(id(param))


def note_update(graph: Any, param: torch.Tensor) -> None:
    """Note that an update reads the gradient of ``param`` that the graph has written."""
    traced = _traced(graph)
    if id(param) in traced.cleared:
        traced.updated[id(param)] = param


def install(drop_later: Callable[[], Callable[[Sequence[torch.Tensor]], None] | None]) -> None:
    """Have graphs that return end with these gradients cleared; once.

    Args:
        drop_later: returns None if gradients are kept, else what takes the parameters whose
            gradients have to go when the call ends: code behind a graph break may read them.
    """
    from torch._dynamo.output_graph import OutputGraph

    stock: Any = OutputGraph.compile_subgraph

    def compile_subgraph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
        later = drop_later()
        if later is not None:
            params = list(_traced(self).updated.values())
            later(params if reason.graph_break else ())
            for param in () if reason.graph_break else params:
                _clear(self, param)
        return stock(self, tx, reason, *args, **kwargs)

    OutputGraph.compile_subgraph = compile_subgraph  # type: ignore[method-assign]


def _clear(graph: Any, param: torch.Tensor) -> None:
    from torch._dynamo.variables.constant import ConstantVariable

    effects = graph.side_effects
    variable = effects.id_to_variable[id(param)]
    effects.store_attr(variable, "grad", ConstantVariable.create(None))


def _pending(effects: Any, param: torch.Tensor) -> Any:
    """Return what the graph has written to ``.grad`` of ``param``, or None if nothing."""
    variable = effects.id_to_variable.get(id(param))
    if variable is None or not effects.has_pending_mutation_of_attr(variable, "grad"):
        return None
    return effects.load_attr(variable, "grad")


def _is_none(variable: Any) -> bool:
    if variable is None or not variable.is_python_constant():
        return False
    return variable.as_python_constant() is None
