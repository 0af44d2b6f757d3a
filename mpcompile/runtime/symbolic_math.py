"""Let an optimizer's ``min``, ``max`` and ``math`` functions take symbols while it is traced."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpcompile.runtime.symbols import SYMBOLS

_OF_SEVERAL = (builtins.min, builtins.max)
"""These take one iterable too."""


def _symbolic(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def either(*args: Any, **kwargs: Any) -> Any:
        if plain in _OF_SEVERAL and len(args) == 1:
            args = (list(args[0]),)
            if any(isinstance(arg, SYMBOLS) for arg in args[0]):
                return traced(*args[0])
        if any(isinstance(arg, SYMBOLS) for arg in args):
            return traced(*args)
        return plain(*args, **kwargs)

    return either


def _smaller(a: Any, b: Any) -> Any:
    return torch.where(b < a, b, a) if _has_tensor(a, b) else torch.sym_min(a, b)


def _larger(a: Any, b: Any) -> Any:
    return torch.where(b > a, b, a) if _has_tensor(a, b) else torch.sym_max(a, b)


def _has_tensor(*args: Any) -> bool:
    return any(isinstance(arg, torch.Tensor) for arg in args)


_BUILTINS = {
    "min": _symbolic(builtins.min, lambda *args: functools.reduce(_smaller, args)),
    "max": _symbolic(builtins.max, lambda *args: functools.reduce(_larger, args)),
}
_MATH = types.SimpleNamespace(
    **{
        **vars(math),
        "sqrt": _symbolic(math.sqrt, torch.sym_sqrt),
        "pow": _symbolic(math.pow, lambda a, b: torch.sym_float(a) ** b),
    }
)


@contextlib.contextmanager
def symbolic_math(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let ``min``, ``max`` and ``math`` in the optimizer's modules take symbols.

    The stand-ins do what the originals do with everything else, so other threads may meet them.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for module in _globals_of(optimizer):
        for key in ("min", "max"):
            if key not in module:
                undo.append((module, key, None))
                module[key] = _BUILTINS[key]
        for key, value in list(module.items()):
            if value is math:
                undo.append((module, key, value))
                module[key] = _MATH
            elif value is math.sqrt or value is math.pow:
                undo.append((module, key, value))
                module[key] = getattr(_MATH, value.__name__)
        if "_get_capturable_supported_devices" in module:
            key = "_get_capturable_supported_devices"
            undo.append((module, key, module[key]))
            module[key] = lambda *args, **kwargs: ["cpu", "cuda", "xpu", "hpu"]
    try:
        yield
    finally:
        for module, key, value in reversed(undo):
            if value is None:
                del module[key]
            else:
                module[key] = value


def _globals_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the global names that the methods of the optimizer's classes see."""
    found: dict[int, dict[str, Any]] = {}
    for cls in type(optimizer).__mro__:
        for value in vars(cls).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, types.FunctionType) and cls is not torch.optim.Optimizer:
                found[id(function.__globals__)] = function.__globals__
    return list(found.values())
