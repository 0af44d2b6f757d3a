"""Try a new kernel on copies of a few tensors before it touches the optimizer's own.

A traced step may be any code, so what was derived from it is compared with it once: one small
tensor of each kind, one step by the kernel, one by the optimizer's own code. An update that
differs, or one that draws random numbers, runs as eager.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from mpcompile.errors import CodegenError
from mpcompile.runtime import dispatch
from mpcompile.runtime.cases import OWN, SCALE
from mpcompile.runtime.classes import Classes, Member
from mpcompile.runtime.late_state import settle
from mpcompile.runtime.planning import GradTreatment
from mpcompile.runtime.prepared import Prepared
from mpcompile.runtime.structure import copy_attributes, flat_items
from mpcompile.runtime.symbolic_math import symbolic_math
from mpcompile.runtime.tracing import reasons, step_code

TOLERANCE = 1e-3
"""Largest difference, relative to the change that the step makes."""
TOLERANCE_WITH_CALLS = 0.1
"""The same where 16-bit matrix products may amplify a difference in the last bit."""
_FEW = 3
"""Coupled parameters of a kind that are copied, and parameters without a gradient."""


def check(
    prepared: Prepared,
    optimizer: torch.optim.Optimizer,
    classes: Classes,
    grads: Sequence[torch.Tensor],
    treatment: GradTreatment,
    copies: dict[torch.Tensor, torch.Tensor],
    without: Sequence[Member] = (),
) -> None:
    """Compare one step of the kernel of ``prepared`` with one of ``optimizer``, on copies.

    ``without`` are parameters that have no gradient.

    Raises:
        CodegenError: they differ.
    """
    is_coupled = bool(prepared.kernel.totals)
    rows = _smallest_of_each_kind(prepared, _FEW if is_coupled else 1)
    members = [prepared.members[row] for row in rows]
    used = [  # as precise as the optimizer's own code takes them
        _finite(grads[row].detach().to(m.param.dtype).to(grads[row].dtype, copy=True))
        for row, m in zip(rows, members, strict=True)
    ]
    beside = without[:_FEW] if is_coupled else ()
    before, eager, fused = (_Copy(optimizer, members, beside) for _ in range(3))
    devices = {m.param.device for m in members if m.param.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        with reasons(optimizer):
            eager.step(used)
        narrow = {
            clone: torch.empty_like(clone, dtype=copies[m.param].dtype)
            for m, clone in zip(members, fused.params, strict=True)
            if m.param in copies
        }
        clones = [Member(p, m.group) for m, p in zip(members, fused.params, strict=True)]
        trial = Prepared(
            fused.optimizer,
            classes.of(fused.optimizer),
            clones,
            used,
            treatment,
            narrow,
            prepared.cache_dir,
        )
        if not trial.is_current(used):
            raise CodegenError("fuse-updates: the state changes while it is read.")
        trial.take_factors([1.0] * len(used) if OWN in treatment.steps else ())
        trial.launch([1.0 if step == SCALE else math.inf for step in treatment.steps])
        settle(fused.optimizer)
    _compare(before, eager, fused, TOLERANCE if prepared.calls is None else TOLERANCE_WITH_CALLS)


class _Copy:
    """A shallow copy of an optimizer with clones of a few parameters and their state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Sequence[Member],
        beside: Sequence[Member],
    ) -> None:
        copy: Any = object.__new__(type(optimizer))
        copy.__dict__.update(copy_attributes(optimizer))
        copy.grad_scale = copy.found_inf = None
        self.optimizer = copy
        clones = [m.param.detach().clone().requires_grad_() for m in (*members, *beside)]
        self.params = clones[: len(members)]
        groups = [{k: _clone(v) for k, v in g.items() if k != "params"} for g in _groups(optimizer)]
        for index, group in enumerate(groups):
            mine = zip((*members, *beside), clones, strict=True)
            group["params"] = [param for member, param in mine if member.group == index]
        self.optimizer.param_groups = groups
        self.optimizer.state = defaultdict(dict)
        for member, param in zip((*members, *beside), clones, strict=True):
            state = optimizer.state.get(member.param, {})
            self.optimizer.state[param] = {key: _clone(value) for key, value in state.items()}

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        """Run the optimizer's own code on ``grads``."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.detach().to(param.dtype, copy=True)
        with dispatch.suspended(), symbolic_math(self.optimizer):  # what was traced
            step_code(self.optimizer)(self.optimizer)

    def values(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and state as tensors, with names."""
        found = []
        for param in self.params:
            found.append(("param", param.detach()))
            for key, value in self.optimizer.state[param].items():
                is_number = isinstance(value, (int, float, torch.Tensor))
                found += [(key, torch.as_tensor(value))] if is_number else []
        for group in self.optimizer.param_groups:
            for path, value in flat_items(group):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                found += [(path, torch.as_tensor(value))] if is_number else []
        return found


def _finite(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` with numbers in the place of what is not finite, which would tell nothing."""
    return torch.where(grad.isfinite(), grad, 2.0**-10)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(_clone, value)) if type(value) in (list, tuple) else value


def _smallest_of_each_kind(prepared: Prepared, count: int) -> list[int]:
    """Return ``count`` rows of each kind, in order; tensors without elements say nothing."""
    kinds: dict[int, list[tuple[float, int]]] = {}
    for row, (kind, member) in enumerate(zip(prepared.rows.kinds, prepared.members, strict=False)):
        kinds.setdefault(kind, []).append((member.param.numel() or math.inf, row))
    return sorted(row for sizes in kinds.values() for _, row in heapq.nsmallest(count, sizes))


def _compare(before: _Copy, eager: _Copy, fused: _Copy, tolerance: float) -> None:
    for (name, old), (_, want), (_, found) in zip(
        before.values(), eager.values(), fused.values(), strict=True
    ):
        precision = torch.finfo(want.dtype).eps if want.dtype.is_floating_point else 0.0
        old, want, found = (torch.nan_to_num(value.double()) for value in (old, want, found))
        bound = tolerance * (want - old).norm() + 8 * precision * want.norm()
        difference = (found - want).norm()
        if not difference <= bound:
            raise CodegenError(
                f"fuse-updates: on a trial, the kernel for {type(eager.optimizer).__name__} gave "
                f"another {name!r} than its step (off by {float(difference):.2g}, allowed "
                f"{float(bound):.2g}). Does the step draw random numbers? If not, please report it."
            )
