"""What happens to gradients between backward and update: unscaling, clipping, skipping.

Each step is one number that the update kernel reads, so nothing is written in between: a factor
where a norm was clipped, a bound where values were. Only where gradients stay visible are they
written, by the same kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.runtime.cases import CLAMP, OWN, SCALE, before_clamp

if TYPE_CHECKING:
    from mpcompile.runtime.norms import NormKernels
    from mpcompile.runtime.overflows import NotFinite
    from mpcompile.runtime.prepared import Number, Prepared

NORM_EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm before it divides."""


@dataclass(frozen=True)
class ClipNorm:
    """``torch.nn.utils.clip_grad_norm_`` over the gradients of the update."""

    max_norm: float
    norm_type: float = 2.0


@dataclass(frozen=True)
class ClipValue:
    """``torch.nn.utils.clip_grad_value_`` over the gradients of the update."""

    value: float


Verdict = Callable[["NotFinite | None"], torch.Tensor]
"""Returns one number, which skips an update if it is not zero.

It is told what is not finite among the gradients, or None to look by itself.
"""


@dataclass(frozen=True)
class GradPlan:
    """Treatment of the gradients: times ``own_factors``, times ``factor``, then ``clips`` in order.

    ``own_factors`` has a number for each gradient that is there, or none. ``factor`` is a tensor
    where only a device knows it. ``skip``, one number, skips the update if it is not zero;
    ``verdict``, which is asked once a step, takes its place. ``write`` leaves the treated gradients
    in the tensors that were given, as eager does.
    """

    factor: float | torch.Tensor = 1.0
    clips: tuple[ClipNorm | ClipValue, ...] = ()
    skip: torch.Tensor | None = None
    write: bool = False
    own_factors: tuple[float, ...] = ()
    verdict: Verdict | None = None

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of the kernel. A first scale by a norm takes the place of a factor of one."""
        kinds = [SCALE if isinstance(clip, ClipNorm) else CLAMP for clip in self.clips]
        first = [OWN] if self.own_factors else []
        return (*first, *kinds) if self._is_plain else (*first, SCALE, *kinds)

    @property
    def _is_plain(self) -> bool:
        return not self.scales and bool(self.clips or self.own_factors)

    @property
    def scales(self) -> bool:
        """Whether there is a factor other than one."""
        return isinstance(self.factor, torch.Tensor) or self.factor != 1.0

    @property
    def may_skip(self) -> bool:
        """Whether the update may be told to do nothing."""
        return self.skip is not None or self.verdict is not None

    def decide(self, found: NotFinite | None = None) -> torch.Tensor | None:
        """Return what skips the update if it is not zero; None if nothing does."""
        return self.skip if self.verdict is None else self.verdict(found)

    def look(
        self, prepared: Prepared, norms: NormKernels, grads: Sequence[torch.Tensor]
    ) -> tuple[list[Number | None], torch.Tensor | None, NotFinite | None]:
        """Return the number of each step, the last norm, and what a verdict has to know.

        Each norm is one pass over the gradients. The first one finds out what is not finite too;
        without one that is a pass by itself. A number that a device computed where it is needed is
        None, and so is what is not one number for all gradients.
        """
        numbers: list[Number | None] = [None] if self.own_factors else []
        numbers += [] if self._is_plain else [self.factor]
        norm = found = None
        for clip in self.clips:
            if isinstance(clip, ClipValue):
                numbers.append(float(clip.value))
                continue
            done = self.steps[: len(numbers)]
            checks = self.verdict is not None and found is None
            number, norm, seen = norms.clip(prepared, grads, done, numbers, clip, checks)
            found = seen if found is None else found
            numbers.append(number)
        if self.verdict is not None and found is None:
            factors = before_clamp(self.steps)
            found = norms.check(prepared, grads, factors, numbers[: len(factors)])
        return numbers, norm, found


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """Return what gradients of ``norm`` are multiplied by, rounded as torch rounds it.

    In f32 Python does it, without four calls of torch: a sum, product or quotient of two numbers in
    f64 that is then rounded to f32 is the one of f32.
    """
    if norm.dtype != torch.float32:
        return torch.clamp(max_norm / (norm + NORM_EPSILON), max=1.0).item()
    reciprocal = _f32(1.0 / _f32(norm.item() + _f32(NORM_EPSILON)))
    return min(_f32(reciprocal * _f32(max_norm)), 1.0)


def _f32(value: float) -> float:
    return ctypes.c_float(value).value


def apply_eagerly(
    plan: GradPlan, grads: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Return the gradients after ``plan``, in place if it writes, and the last norm."""
    present = [grad for grad in grads if grad is not None]
    is_scaled = plan.scales or bool(plan.own_factors)
    if not present or not (plan.clips or is_scaled):
        return list(grads), None
    treated = present if plan.write else [_copied(grad, is_scaled) for grad in present]
    norm = None
    if plan.own_factors:
        torch._foreach_mul_(treated, list(plan.own_factors))
    if plan.scales:
        torch._foreach_mul_(treated, plan.factor)
    for clip in plan.clips:
        if isinstance(clip, ClipValue):
            for grad in treated:
                grad.clamp_(min=-clip.value, max=clip.value)
        else:
            norm = torch.nn.utils.get_total_norm(treated, clip.norm_type)
            coefficient = clip_coefficient(norm, clip.max_norm)
            torch._foreach_mul_(treated, coefficient)
    rest = iter(treated)
    return [None if grad is None else next(rest) for grad in grads], norm


def _copied(grad: torch.Tensor, is_scaled: bool) -> torch.Tensor:
    """Return a copy, in fp32 if 16 bits have no room for the product with a factor."""
    if is_scaled and grad.dtype in (torch.float16, torch.bfloat16):
        return grad.float()
    return grad.clone()


def root(total: float, order: float) -> float:
    """Return the norm from the sum (or maximum) that a kernel made."""
    if order in (1.0, math.inf):
        return total
    return math.sqrt(total) if order == 2.0 else total ** (1.0 / order)


class OwnGrads(Sequence[torch.Tensor]):
    """The gradients that parameters hold when one is asked for."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params

    def __len__(self) -> int:
        return len(self._params)

    def __getitem__(self, position: Any) -> Any:
        grad = self._params[position].grad
        assert grad is not None
        return grad
