"""Gradients that nobody is to see after a call (``grads="drop"``), where no graph takes them away.

A step in regions leaves them in ``.grad`` until the call ends, for the code between its graphs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch

from mpcompile.runtime.structure import params_of
from mpcompile.runtime.updates import Updates


class Drops:
    """Clears gradients at the end of a call that cleared them first and updated from them."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._cleared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._params: list[torch.Tensor] = []
        self._warned = False

    def begin_call(self) -> None:
        """Forget what the last call did."""
        self._cleared.clear()
        self._params = []
        self._updates.take_used()

    def note_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the step has set the gradients of ``optimizer`` to None."""
        if not self._updates.is_used(optimizer):
            self._cleared.add(optimizer)

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Have the gradients of ``params`` go when the call ends."""
        self._params += params

    def end_call(self) -> None:
        """Clear what is to be cleared; say once what has to stay."""
        used = self._updates.take_used()
        for optimizer in used:
            if optimizer in self._cleared:
                self._params += params_of(optimizer)
        for param in self._params:
            param.grad = None
        if not self._warned:
            self._warn_of_kept(used)

    def _warn_of_kept(self, used: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in used:
            params = params_of(optimizer)
            kept = [index for index, param in enumerate(params) if param.grad is not None]
            if not kept:
                continue
            self._warned = True
            name = f"{type(optimizer).__name__}, parameter {kept[0]}"
            warnings.warn(
                f"mpcompile: grads='drop' keeps {len(kept)} of {len(params)} gradients ({name}, "
                "the first): the step does not set them to None before its backward in one and the "
                "same graph or by opt.zero_grad(), so the next step may add to them. Clear them "
                "first, or last, or leave the option out.",
                stacklevel=2,
            )
            return
