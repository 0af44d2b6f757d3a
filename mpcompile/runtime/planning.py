"""What an update is prepared for: parameters, how their gradients are treated, each one's case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpcompile.codegen.values import DTYPE_NAMES
from mpcompile.errors import CodegenError
from mpcompile.runtime.analysis import Analysis
from mpcompile.runtime.cases import PlannedCase, Surroundings, plan_case
from mpcompile.runtime.classes import Member
from mpcompile.runtime.machines import machine_of
from mpcompile.runtime.structure import ParamStructure


@dataclass(frozen=True)
class GradTreatment:
    """How gradients reach the update; part of what an update is prepared for.

    ``may_skip``: a launch may be told to do nothing.
    """

    steps: tuple[str, ...] = ("scale",)
    write: bool = False
    may_skip: bool = False


def plan_members(
    members: Sequence[Member],
    grads: Sequence[torch.Tensor],
    sorted_members: Sequence[tuple[ParamStructure, Analysis]],
    treatment: GradTreatment,
    copies: dict[torch.Tensor, torch.Tensor],
) -> list[PlannedCase]:
    """Return the planned case of each member; equal ones are one object."""
    made: dict[tuple[int, Surroundings], PlannedCase] = {}
    out = []
    for member, grad, (structure, analysis) in zip(members, grads, sorted_members, strict=True):
        copy = copies.get(member.param)
        around = Surroundings(
            DTYPE_NAMES[grad.dtype],
            None if copy is None else DTYPE_NAMES[copy.dtype],
            treatment.write,
            treatment.steps,
        )
        key = (id(analysis), around)
        if key not in made:
            made[key] = plan_case(analysis, structure, around)
        out.append(made[key])
    return out


def check_supported(members: Sequence[Member], grads: Sequence[torch.Tensor]) -> None:
    """Raise CodegenError for what kernels do not read."""
    for member, grad in zip(members, grads, strict=True):
        for what, tensor in (("parameter", member.param), ("gradient", grad)):
            if tensor.layout is not torch.strided:
                raise CodegenError(f"fuse-updates: a {what} is {tensor.layout}.")
            check_same_device(f"a {what}", tensor, members[0].param)
            if tensor.device.type != "cpu" and machine_of(tensor.device) is None:
                raise CodegenError(f"fuse-updates: a {what} is on {tensor.device.type}.")
            if tensor.dtype not in DTYPE_NAMES or not tensor.dtype.is_floating_point:
                raise CodegenError(f"fuse-updates: a {what} is {tensor.dtype}.")
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise CodegenError(f"fuse-updates: a {what} is a {type(tensor).__name__}.")


def check_every_group(optimizer: torch.optim.Optimizer, members: Sequence[Member]) -> None:
    """Raise if a group has no member; for a step that leaves numbers in all groups.

    What it does to a group is known from a parameter of it.
    """
    present = {member.group for member in members}
    empty = [str(i) for i in range(len(optimizer.param_groups)) if i not in present]
    if empty:
        raise CodegenError(
            "fuse-updates: the step leaves numbers in its parameter groups, and no parameter of "
            f"group {', '.join(empty)} has a gradient."
        )


def check_same_device(what: str, tensor: torch.Tensor, param: torch.Tensor) -> None:
    """Raise CodegenError if ``tensor`` is not where ``param`` is."""
    if tensor.device != param.device:
        raise CodegenError(
            f"fuse-updates: {what} is on {tensor.device} and a parameter on {param.device}; one "
            "kernel updates what lies on one device."
        )
