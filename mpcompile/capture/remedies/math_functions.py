"""Functions of ``math`` on numbers that change, in any step of ours.

They are spelled with those that Dynamo has symbols for. It makes a constant of the argument of any
other, and each value is compiled anew. ``exp`` of a count is what decays of averages warm up by,
and weights of adversarial losses (Ganin et al. 2016). Results may differ from those of ``math`` in
the last bit of a double.

Private torch API, seen in 2.11 to 2.14: ``SymNodeVariable``, the variable of such a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from mpcompile.capture.dynamo_handlers import handle
from mpcompile.runtime.dispatch import is_running


def _exp(x: float) -> float:
    return math.pow(math.e, x)


def _exp2(x: float) -> float:
    return math.pow(2.0, x)


def _log(x: float, base: float = math.e) -> float:
    return math.log2(x) / math.log2(base)


def _log10(x: float) -> float:
    return math.log2(x) / math.log2(10)


def _pow(x: float, y: float) -> float:
    power: float = float(x) ** float(y)
    return power


def _hypot(x: float, y: float) -> float:
    return math.sqrt(x * x + y * y)


_SPELLED: dict[Callable[..., float], Callable[..., float]] = {
    math.exp: _exp,
    math.exp2: _exp2,
    math.log: _log,
    math.log10: _log10,
    math.pow: _pow,
    math.hypot: _hypot,
}


def install() -> None:
    """Trace the spelled functions while a step of ours is traced."""
    for function, spelled in _SPELLED.items():
        handle(function, functools.partial(_trace, spelled))


def _trace(spelled: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the traced number, or None: Dynamo goes on as if it had not asked."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    changes = [isinstance(arg, SymNodeVariable) for arg in args]
    is_known = len(args) in (1, 2) and not kwargs
    if not is_known or not any(changes) or not is_running():
        return None
    if spelled is _pow and not _stays_real(args[0]):
        return None
    return UserFunctionVariable(spelled).call_function(tx, list(args), kwargs)


def _stays_real(base: Any) -> bool:
    """Whether ``base`` has no complex powers, of which ``math.pow`` knows nothing."""
    return base.is_python_constant() and bool(base.as_python_constant() > 0)
