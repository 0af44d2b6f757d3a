"""Find out which gradients are not finite, element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class NotFinite:
    """Which pieces of the gradients of an update hold what is not finite.

    Attributes:
        flags: one for each piece.
        owners: which gradient each piece is of, in ascending order; None if each is a whole one.
    """

    flags: Tensor
    owners: Tensor | None = None

    def first(self) -> Tensor:
        """Return the position of the first gradient among them; any if there is none."""
        piece = self.flags.to(torch.uint8).argmax()
        return piece if self.owners is None else self.owners.take(piece)


def overflows_of(grads: Sequence[Tensor]) -> Tensor:
    """Return a flag for each gradient: whether an element of it is not finite.

    On a GPU the largest magnitude tells, for which there is one kernel over all tensors. On a CPU
    the sum has a fast one; it may overflow by itself, so where it did the elements are looked at.
    """
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    on_cpu = [grad.device.type == "cpu" for grad in dense]
    if all(on_cpu):
        flags = not_finite([grad.sum(dtype=_WIDE.get(grad.dtype)) for grad in dense])
        for index in flags.nonzero().flatten().tolist():
            flags[index] = not dense[index].isfinite().all()
        return flags
    if any(on_cpu):
        each = [overflows_of([grad])[0] for grad in dense]
        return torch.stack([flag.to(each[0].device, non_blocking=True) for flag in each])
    filled = [grad if grad.numel() else grad.new_zeros(1) for grad in dense]
    return not_finite(torch._foreach_norm(filled, math.inf))


def not_finite(sums: Sequence[Tensor]) -> Tensor:
    """Return a flag for each of ``sums``, which are numbers."""
    first = sums[0]
    if all(item.dtype is first.dtype and item.device == first.device for item in sums):
        return ~torch.stack(list(sums)).isfinite()
    flags = [item.isfinite().to(first.device, non_blocking=True) for item in sums]
    return ~torch.stack(flags)
