"""What buffers held before a forward that may have to be undone: BatchNorm statistics and such.

A step whose gradients overflow is skipped as a whole, so the statistics that its forward wrote go
back too. Whether it is skipped is known on the device only; so is what is put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Kept:
    """A buffer, what it held, and the parameters that the forward which wrote to it served.

    None are any. ``is_open`` from the forward to the end of the step; ``is_settled`` once an update
    was decided on, after which the next forward keeps anew.
    """

    buffer: weakref.ref[Tensor]
    value: Tensor
    params: frozenset[int] | None
    is_open: bool = True
    is_settled: bool = False


class BufferSnapshots:
    """Values of buffers as they were when the step began; storage is reused from step to step."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(self, buffers: Sequence[Tensor], params: frozenset[int] | None) -> None:
        """Keep the values of ``buffers``, which a forward for ``params`` is about to write to.

        What an earlier forward of the same step has kept stays.
        """
        for buffer in buffers:
            known = self._kept.get(id(buffer))
            is_known = known is not None and known.buffer() is buffer
            if known is None or not is_known or known.value.shape != buffer.shape:
                value = buffer.detach().clone()
                self._kept[id(buffer)] = _Kept(weakref.ref(buffer), value, params)
            elif known.is_settled or not known.is_open:
                with torch.no_grad():
                    known.value.copy_(buffer)
                known.params, known.is_open, known.is_settled = params, True, False
            elif known.params is not None:
                known.params = None if params is None else known.params | params

    def settle(self, skip: Tensor, params: frozenset[int] | None) -> None:
        """Put buffers back if ``skip`` is set: those written for ``params``, or (None) all."""
        for kept in self._kept.values():
            buffer = kept.buffer()
            if params is not None and kept.params is not None and params.isdisjoint(kept.params):
                continue
            if kept.is_open and buffer is not None:
                with torch.no_grad():
                    skips = skip.to(buffer.device, non_blocking=True)
                    buffer.copy_(torch.where(skips, kept.value, buffer))
                kept.is_settled = True

    def forget(self) -> None:
        """End a step: nothing kept in it is put back any more."""
        for key, kept in list(self._kept.items()):
            kept.is_open = False
            if kept.buffer() is None:
                del self._kept[key]
