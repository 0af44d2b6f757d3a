"""The fused update of one optimizer: what runs instead of ``opt.step()``.

An update that has no kernel (or whose state the optimizer has yet to make) runs as the optimizer's
own step, with the reason; nothing else about a step changes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpcompile.errors import CodegenError
from mpcompile.runtime import dispatch, trial
from mpcompile.runtime.classes import Classes, Member
from mpcompile.runtime.grads import GradPlan, apply_eagerly
from mpcompile.runtime.late_state import LateState, is_late_elsewhere, settle
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.machines import is_awaited, waiting
from mpcompile.runtime.norms import NormKernels
from mpcompile.runtime.planning import GradTreatment, check_every_group
from mpcompile.runtime.prepared import Prepared
from mpcompile.runtime.record import KernelRecord, UpdateRecord
from mpcompile.runtime.structure import params_of
from mpcompile.runtime.tracing import StateMissing

MAX_PREPARED = 8
AMP_NAMES = ("grad_scale", "found_inf")
"""Attributes through which a ``GradScaler`` tells a fused step to unscale and to skip."""
HOOKS_AGAIN = (
    "fuse-updates: the step calls its base's, within which step hooks run once more; generated "
    "code would not call them."
)
_warned: set[str] = set()


@dataclass(frozen=True)
class Outcome:
    """What one update did. ``norm`` is the gradient norm if it was clipped by norm.

    ``skipped`` is what the host knows: an update that a device skips by itself is not among them.
    """

    fused: bool
    reason: str = ""
    norm: torch.Tensor | None = None
    skipped: bool = False


class OptimizerUpdate:
    """Runs the step of ``optimizer`` as one kernel over all its tensors."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        original_step: Callable[[torch.optim.Optimizer], Any] | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._original_step = original_step or dispatch.step_without_hooks(optimizer)
        self.cache_dir = cache_dir
        self.classes = Classes(optimizer)
        self.norms = NormKernels(cache_dir)
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.prepared: dict[Any, Prepared] = {}
        self._own: dict[Any, Any] = {}
        self.reason = _refusal(optimizer)
        self.handle = ""
        self.loss_scale: LossScale | None = None
        self.num_prepared = 0
        self._late: LateState | None = None
        self.used = False
        self._tried: set[tuple[str, bool]] = set()

    def set_copies(self, copies: dict[torch.Tensor, torch.Tensor]) -> None:
        """Have the update write a 16-bit copy of each parameter that is a key of ``copies``."""
        self.copies = dict(copies)
        self.prepared.clear()

    def record(self) -> UpdateRecord:
        """Return what the update does, for reports."""
        kernels: list[KernelRecord] = []
        for prepared in self.prepared.values():
            kernels += (*self.norms.records(prepared), prepared.record())
        name = type(self.optimizer).__name__
        tensors = [
            leaf
            for state in self.optimizer.state.values()
            for leaf in pytree.tree_leaves(state)
            if isinstance(leaf, torch.Tensor)
        ]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return UpdateRecord(name, self._current_reason(), tuple(kernels), size)

    def _current_reason(self) -> str:
        """Return why the optimizer's own step would run now, or nothing."""
        again = not self.reason and dispatch.runs_hooks_again(self.optimizer)
        return HOOKS_AGAIN if again else self.reason

    def run(
        self, grads: Sequence[torch.Tensor | None] | None = None, plan: GradPlan | None = None
    ) -> Outcome:
        """Update the parameters.

        Args:
            grads: one for each parameter in the order of the groups, or None for their ``.grad``.
                None among them leaves a parameter out.
            plan: what happens to the gradients first.
        """
        plan = plan or GradPlan()
        if is_late_elsewhere(self.optimizer, self._late):
            settle(self.optimizer)
        self.used = True
        reason = self._current_reason()
        if plan.skip is not None and (reason or not is_awaited(plan.skip)):
            if bool(plan.skip.item()):
                _, norm = apply_eagerly(replace(plan, write=False), grads or [])
                return Outcome(not reason, reason, norm, skipped=True)
            plan = replace(plan, skip=None)
        self._grad_mode = torch.is_grad_enabled()
        own = grads is None
        with torch.no_grad():
            if grads is None:
                prepared = None if reason else self._again(plan)
                if prepared is not None:
                    return self._launch(prepared, prepared.own_grads, plan)
                grads = [param.grad for param in params_of(self.optimizer)]
            present = [grad for grad in grads if grad is not None]
            if not present or reason:
                return self._eagerly(grads, plan, reason)
            try:
                prepared = self._ready(grads, present, plan)
            except StateMissing:
                return self._eagerly(grads, plan, "")
            except CodegenError as error:
                self._give_up(str(error))
                return self._eagerly(grads, plan, self.reason)
            if own:
                self._own[_treatment(plan)] = _key(grads, present, plan)
            return self._launch(prepared, present, plan)

    def _again(self, plan: GradPlan) -> Prepared | None:
        """Return what last ran on the parameters' ``.grad``, if it fits those of now."""
        prepared = self.prepared.get(self._own.get(_treatment(plan)))
        if prepared is None or not prepared.is_current(prepared.own_grads):
            return None
        return prepared

    def _launch(self, prepared: Prepared, grads: Sequence[torch.Tensor], plan: GradPlan) -> Outcome:
        prepared.current_grads = grads
        if prepared.late is None and prepared.machine is not None:
            settle(self.optimizer)
        prepared.take_factors(plan.own_factors)
        numbers, norm, found = plan.look(prepared, self.norms, grads)
        if not prepared.take_skip(plan.decide(found)):
            prepared.current_grads = ()
            return Outcome(fused=True, norm=norm, skipped=True)
        prepared.launch(numbers)
        return Outcome(fused=True, norm=norm)

    def _ready(
        self,
        grads: Sequence[torch.Tensor | None],
        present: list[torch.Tensor],
        plan: GradPlan,
    ) -> Prepared:
        """Return a table that is up to date; make it if need be."""
        key = _key(grads, present, plan)
        prepared = self.prepared.get(key)
        if prepared is not None and prepared.is_current(present):
            return prepared
        settle(self.optimizer)
        if len(self.prepared) >= MAX_PREPARED:
            self.prepared.clear()
        self.num_prepared += 1
        groups = self.optimizer.param_groups
        everyone = [Member(p, g) for g, group in enumerate(groups) for p in group["params"]]
        members = [m for m, grad in zip(everyone, grads, strict=True) if grad is not None]
        treatment = _treatment(plan)
        without = [m for m, grad in zip(everyone, grads, strict=True) if grad is None]
        with waiting(present[0].device):
            prepared = Prepared(
                self.optimizer,
                self.classes,
                members,
                present,
                treatment,
                self.copies,
                self.cache_dir,
                self._late,
            )
            if prepared.leaves_numbers:
                check_every_group(self.optimizer, members)
            self._late = self._late if prepared.late is None else prepared.late.late
            tried = (prepared.source, bool(without and prepared.kernel.totals))
            if tried not in self._tried:
                trial.check(
                    prepared, self.optimizer, self.classes, present, treatment, self.copies, without
                )
                self._tried.add(tried)
        self.prepared[key] = prepared
        if not prepared.is_current(present):
            raise CodegenError("fuse-updates: parameters, state or gradients change while read.")
        return prepared

    def _give_up(self, reason: str) -> None:
        """Run as eager from now on, and say so once for each reason."""
        self.reason = reason
        if reason not in _warned:
            _warned.add(reason)
            name = type(self.optimizer).__name__
            warnings.warn(f"mpcompile: {name} runs as eager PyTorch. {reason}", stacklevel=2)

    def _eagerly(
        self, grads: Sequence[torch.Tensor | None], plan: GradPlan, reason: str
    ) -> Outcome:
        """Run the optimizer's own step on the gradients after ``plan``."""
        settle(self.optimizer)
        params = params_of(self.optimizer)
        grads = [None if g is None else g.to(p.dtype) for p, g in zip(params, grads, strict=True)]
        skip = plan.decide()
        if skip is not None and bool(skip.item()):
            _, norm = apply_eagerly(replace(plan, write=False), grads)
            return Outcome(fused=False, reason=reason, norm=norm, skipped=True)
        treated, norm = apply_eagerly(plan, grads)
        before = [p.grad for p in params]
        grad_mode = self._grad_mode
        try:
            for param, grad in zip(params, treated, strict=True):
                param.grad = grad
            amp = _without_scaler(self.optimizer)
            with amp, dispatch.suspended(), torch.set_grad_enabled(grad_mode):
                self._original_step(self.optimizer)
        finally:
            if not plan.write:
                for param, grad in zip(params, before, strict=True):
                    param.grad = grad
        return Outcome(fused=False, reason=reason, norm=norm)


@contextlib.contextmanager
def _without_scaler(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide what a ``GradScaler`` asked for: it has been done."""
    asked = {name: vars(optimizer).pop(name) for name in AMP_NAMES if name in vars(optimizer)}
    try:
        yield
    finally:
        vars(optimizer).update(asked)


def _key(
    grads: Sequence[torch.Tensor | None], present: Sequence[torch.Tensor], plan: GradPlan
) -> tuple[object, ...]:
    """Return what a table is made for: which parameters have a gradient, and what happens to it."""
    is_whole = len(present) == len(grads)
    absent = () if is_whole else tuple(i for i, grad in enumerate(grads) if grad is None)
    return len(grads), absent, _treatment(plan)


def _treatment(plan: GradPlan) -> GradTreatment:
    return GradTreatment(plan.steps, plan.write, plan.may_skip)


def _refusal(optimizer: torch.optim.Optimizer) -> str:
    """Return why ``optimizer`` is not even traced, or nothing."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "fuse-updates: the step is differentiable, so autograd has to see its operations."
    return ""
