"""The arithmetic of a 16-bit bucket: what is divided before the cast, and what after the sum.

The mean over ``world`` ranks is the sum of ``gradient / world``. Divided wholly before the cast,
small gradients fall below the smallest 16-bit number; divided wholly after it, the sum overflows.
So a power of two near ``sqrt(world)`` is divided off before, exactly, the rest in float32 after.

float16 has few exponents, so its buckets are also scaled by a power of two: it puts the largest
sum of the step before, which every rank knows, just below ``TARGET``; for a first step ranks ask
each other. A sum that overflows all the same is sent again; see ``group.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

TARGET = 1024.0
"""Where the largest sum of a float16 bucket is put: a factor of 64 below overflow."""
_LARGEST_EXPONENT = 60


def predivision(world: int) -> int:
    """Return the smallest power of two whose square is not below ``world``."""
    power = 1
    while power * power < world:
        power *= 2
    return power


def post_factor(world: int) -> float:
    """Return what the sum over ranks is multiplied by to complete the mean."""
    return predivision(world) / world


def cast_into(sent: torch.Tensor, grads: Sequence[torch.Tensor], scale: float) -> None:
    """Write ``grads`` times ``scale`` into ``sent``, one behind the other.

    Each element is rounded once, to the dtype of ``sent``.
    """
    parts = sent.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        source = grad if grad.dtype is sent.dtype else grad.float()
        torch.mul(source, scale, out=part.view(grad.shape))


def largest_magnitude(bucket: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a bucket, 0-dim float32; not finite if an element is not."""
    low, high = torch.aminmax(bucket)
    return torch.maximum(-low.float(), high.float())


def largest_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest finite magnitude among ``grads``, 0-dim float32."""
    zeroed = [torch.nan_to_num(grad.float(), 0.0, 0.0, 0.0) for grad in grads if grad.numel()]
    return torch.stack([largest_magnitude(grad) for grad in zeroed]).max()


def scale_for(largest: float) -> float:
    """Return the power of two that puts sums of magnitude ``largest`` just below ``TARGET``.

    One if ``largest`` is zero or not finite.
    """
    if not math.isfinite(largest) or largest <= 0.0:
        return 1.0
    exponent = math.floor(math.log2(TARGET / largest))
    return 2.0 ** max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, exponent))
