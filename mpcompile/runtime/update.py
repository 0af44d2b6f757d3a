"""The fused update of one optimizer: what runs instead of ``opt.step()``.

An update that has no kernel (or whose state the optimizer has yet to make) runs as the optimizer's
own step, with the reason; nothing else about a step changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpcompile.errors import CodegenError
from mpcompile.runtime.classes import Classes, Member
from mpcompile.runtime.grads import GradPlan, apply_eagerly
from mpcompile.runtime.norms import NormKernels
from mpcompile.runtime.prepared import GradTreatment, Prepared
from mpcompile.runtime.tracing import StateMissing

MAX_PREPARED = 8


@dataclass(frozen=True)
class Outcome:
    """What one update did. ``norm`` is the gradient norm if it was clipped by norm."""

    fused: bool
    reason: str = ""
    norm: torch.Tensor | None = None
    skipped: bool = False


class OptimizerUpdate:
    """Runs the step of ``optimizer`` as one kernel over all its tensors."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        original_step: Callable[[], Any] | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._original_step = original_step or optimizer.step
        self.cache_dir = cache_dir
        self.classes = Classes(optimizer)
        self.norms = NormKernels(cache_dir)
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.prepared: dict[Any, Prepared] = {}
        self.reason = ""
        self.num_prepared = 0

    def set_copies(self, copies: dict[torch.Tensor, torch.Tensor]) -> None:
        """Have the update write a 16-bit copy of each parameter that is a key of ``copies``."""
        self.copies = dict(copies)
        self.prepared.clear()

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
        if plan.skip is not None and bool(plan.skip.item()):
            return Outcome(fused=not self.reason, reason=self.reason, skipped=True)
        with torch.no_grad():
            members, present = self._present(grads)
            if not members:
                return self._eagerly(grads, plan, "")
            if self.reason:
                return self._eagerly(grads, plan, self.reason)
            try:
                prepared = self._ready(members, present, plan)
            except StateMissing:
                return self._eagerly(grads, plan, "")
            except CodegenError as error:
                self._give_up(str(error))
                return self._eagerly(grads, plan, self.reason)
            prepared.current_grads = present
            inputs, norm = plan.inputs(prepared, self.norms, present)
            prepared.launch(inputs)
        return Outcome(fused=True, norm=norm)

    def _present(
        self, grads: Sequence[torch.Tensor | None] | None
    ) -> tuple[list[Member], list[torch.Tensor]]:
        """Return the parameters that have a gradient, and these gradients."""
        members, present, position = [], [], 0
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                grad = param.grad if grads is None else grads[position]
                position += 1
                if grad is not None:
                    members.append(Member(param, index))
                    present.append(grad)
        return members, present

    def _ready(
        self, members: list[Member], grads: list[torch.Tensor], plan: GradPlan
    ) -> Prepared:
        """Return a table that is up to date; make it if need be."""
        treatment = GradTreatment(plan.steps, plan.write)
        key = (tuple(id(m.param) for m in members), treatment)
        prepared = self.prepared.get(key)
        if prepared is not None and prepared.is_current(grads):
            return prepared
        if len(self.prepared) >= MAX_PREPARED:
            self.prepared.clear()
        self.num_prepared += 1
        prepared = Prepared(
            self.optimizer, self.classes, members, grads, treatment, self.copies, self.cache_dir
        )
        self.prepared[key] = prepared
        if not prepared.is_current(grads):
            raise CodegenError("fuse-updates: parameters, state or gradients change while read.")
        return prepared

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(
            f"{type(self.optimizer).__name__} runs as eager PyTorch: {reason}", stacklevel=2
        )

    def _eagerly(
        self, grads: Sequence[torch.Tensor | None] | None, plan: GradPlan, reason: str
    ) -> Outcome:
        """Run the optimizer's own step on the gradients after ``plan``."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        given = [p.grad for p in params] if grads is None else list(grads)
        treated, norm = apply_eagerly(plan, given)
        before = [p.grad for p in params]
        try:
            for param, grad in zip(params, treated, strict=True):
                param.grad = grad
            self._original_step()
        finally:
            if not plan.write:
                for param, grad in zip(params, before, strict=True):
                    param.grad = grad
        return Outcome(fused=False, reason=reason, norm=norm)
