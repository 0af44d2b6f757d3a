"""What a loss scale adds to the plan of an update: whether to skip it, and what unscales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpcompile.runtime.grads import GradPlan
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.machines import is_awaited
from mpcompile.runtime.overflows import NotFinite


def guarded_plan(
    plan: GradPlan,
    loss_scale: LossScale,
    optimizer: torch.optim.Optimizer,
    grads: Sequence[torch.Tensor | None],
    is_scaled: bool = False,
) -> GradPlan:
    """Return ``plan`` with the verdict of ``loss_scale`` on the gradients, to be asked for once.

    Args:
        plan: what else happens to the gradients.
        loss_scale: of the step.
        optimizer: what is updated.
        grads: what the update reads.
        is_scaled: the graph left ``grads`` scaled; the update unscales them.
    """
    asked = plan.skip

    def verdict(found: NotFinite | None) -> torch.Tensor:
        skip = loss_scale.skip_for(optimizer, grads, found)
        return skip if asked is None else skip.logical_or(asked)

    if is_scaled:
        devices = [grad.device for grad in grads if grad is not None]
        inverse = loss_scale.inverse(devices[0] if devices else torch.device("cpu"))
        plan = replace(plan, factor=plan.factor * _number(inverse))
    return replace(plan, skip=None, verdict=verdict)


def _number(inverse: torch.Tensor) -> float | torch.Tensor:
    """Return ``inverse``, as a tensor where a device that updates reads it by itself."""
    return inverse if is_awaited(inverse) else float(inverse)
