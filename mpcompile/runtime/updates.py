"""All fused updates of one compiled step, one for each optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpcompile.runtime import ops
from mpcompile.runtime.grads import GradPlan
from mpcompile.runtime.guarding import guarded_plan
from mpcompile.runtime.late_state import settle
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.machines import machine_of
from mpcompile.runtime.put_back import remember
from mpcompile.runtime.record import UpdateRecord
from mpcompile.runtime.structure import params_of
from mpcompile.runtime.update import AMP_NAMES, OptimizerUpdate

_ATTRIBUTE = "_mpcompile_updates"
NOT_FUSED = "fuse-updates is off: the optimizer's own step runs."


class Updates:
    """Makes and keeps the updates of the optimizers that one step uses.

    An update is kept by its optimizer, so that it goes when the optimizer goes.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        fused: bool = True,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._cache_dir, self._loss_scale = cache_dir, loss_scale
        self._fused = fused
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def of(
        self,
        optimizer: torch.optim.Optimizer,
        original: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> OptimizerUpdate:
        """Return the update of ``optimizer``; ``original`` is its own step."""
        kept = vars(optimizer).setdefault(_ATTRIBUTE, weakref.WeakKeyDictionary())
        update: OptimizerUpdate | None = kept.get(self)
        if update is None:
            update = kept[self] = OptimizerUpdate(optimizer, original, self._cache_dir)
            if not self._fused:
                update.reason = NOT_FUSED
            update.loss_scale = self._loss_scale
            self._optimizers.add(optimizer)
            ops.register(update)
        return update

    def run(
        self, optimizer: torch.optim.Optimizer, original: Callable[[torch.optim.Optimizer], Any]
    ) -> None:
        """Update the parameters of ``optimizer`` from their ``.grad``; a step in its place."""
        plan = amp_plan(optimizer)
        if self._loss_scale is not None:
            grads = [param.grad for param in params_of(optimizer)]
            plan = guarded_plan(plan, self._loss_scale, optimizer, grads)
        self.of(optimizer, original).run(plan=plan)

    def guard(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return what ends a step of ``optimizer`` that runs as it is, with a closure say.

        Whether it is to be skipped is known when its closure has run, within it. So it is put back
        then, for which the host waits for the device.
        """
        scale = self._loss_scale
        assert scale is not None, "without one nothing is skipped"
        settle(optimizer)
        put_back = remember(optimizer)

        def end() -> None:
            grads = [param.grad for param in params_of(optimizer)]
            if bool(scale.skip_for(optimizer, grads)):
                put_back()

        return end

    def settle(self) -> None:
        """Make the state of all optimizers true on the host."""
        for optimizer in self._optimizers:
            settle(optimizer)

    def is_used(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` was updated since ``take_used``."""
        return optimizer in self._optimizers and self.of(optimizer).used

    def take_used(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that were updated since this was asked last."""
        used = [optimizer for optimizer in self._optimizers if self.of(optimizer).used]
        for optimizer in used:
            self.of(optimizer).used = False
        return used

    def records(self) -> list[UpdateRecord]:
        """Return what each update does."""
        return [self.of(optimizer).record() for optimizer in self._optimizers]

    def num_prepared(self) -> int:
        """Return how many tables were made so far; records change with it."""
        return sum(self.of(optimizer).num_prepared + 1 for optimizer in self._optimizers)


def amp_plan(optimizer: torch.optim.Optimizer) -> GradPlan:
    """Return what a ``GradScaler`` asked of ``optimizer``: unscale, skip, leave true gradients."""
    scale, found_inf = (getattr(optimizer, name, None) for name in AMP_NAMES)
    if scale is None and found_inf is None:
        return GradPlan()
    factor: float | torch.Tensor = 1.0
    if isinstance(scale, torch.Tensor) and machine_of(scale.device) is not None:
        factor = scale.double().reciprocal()
    elif scale is not None:
        factor = 1.0 / float(scale)
    return GradPlan(factor=factor, skip=found_inf, write=scale is not None)
