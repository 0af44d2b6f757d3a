"""A ``GradScaler`` of the program leaves out steps by itself; the loss scale has to hear of it.

Otherwise what a graph has noted would count against the next step, and our scale would stay where
the program's falls: together they would be as large as before.

Private torch API, seen in 2.11 to 2.14: ``GradScaler._found_inf_per_device``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

Told = Callable[[torch.optim.Optimizer, Tensor], None]
"""Is told of each step of a scaler, with a flag on the device: whether it was left out."""

_local = threading.local()


def begin(told: Told) -> None:
    """Tell ``told`` of the steps of scalers in this thread, until ``end``."""
    _stack().append(told)


def end() -> None:
    """Go back to who was told before."""
    _stack().pop()


def _stack() -> list[Told]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Told] = _local.stack
    return stack


def install() -> None:
    """Put the watch into ``GradScaler``, from which all others inherit."""
    stock: Any = GradScaler.step

    @functools.wraps(stock)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, optimizer, *args, **kwargs)
        if _stack() and self.is_enabled():
            _tell(optimizer, self._found_inf_per_device(optimizer).values())
        return result

    # Dynamo runs it as it stands, and what it calls as usual: the step is part of ours.
    GradScaler.step = torch._dynamo.disable(step, recursive=False)  # type: ignore[method-assign]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _tell(optimizer: torch.optim.Optimizer, found: Any) -> None:
    flags = list(found)
    if flags:
        first = flags[0].device
        moved = [flag.to(first, non_blocking=True).reshape(()) for flag in flags]
        _stack()[-1](optimizer, torch.stack(moved).any())
