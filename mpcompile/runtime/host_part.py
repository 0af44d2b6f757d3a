"""Split an update between a device and the host, so that neither waits for the other.

Hyperparameters, Python numbers in state and 0-dim state tensors in host memory (the step counts of
most optimizers) are known to the host: what depends on them alone is computed there, once a tensor,
and travels to the device in the table. What depends on a value of the device is computed there; so
is what a step leaves in the host's state if the device may skip the step (``late_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpcompile.codegen.expr import (
    Apply,
    Constant,
    Expr,
    Scalar,
    Store,
    cast,
    postorder,
    scalar,
    substitute,
)
from mpcompile.codegen.schedule import Case, leaves
from mpcompile.errors import CodegenError
from mpcompile.runtime.cases import OWN_FACTOR, PlannedCase
from mpcompile.runtime.classes import Member, group_tensors
from mpcompile.runtime.late_state import LATE, NEXT, SEEN
from mpcompile.runtime.machines import Machine

ON_DEVICE = "at."
"""Prefix of the column that holds a hyperparameter which is a tensor of the device."""


def split_all(
    planned: Sequence[PlannedCase],
    members: Sequence[Member],
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    may_skip: bool = False,
) -> list[PlannedCase]:
    """Return the split case of each member; equal ones are one object.

    ``may_skip``: the device may skip a step, so it counts for itself what the host counts.
    """
    is_late = may_skip and not any(plan.calls or plan.copies for plan in planned)
    made: dict[tuple[int, frozenset[str]], PlannedCase] = {}
    out = []
    for member, plan in zip(members, planned, strict=True):
        group = optimizer.param_groups[member.group]
        known = names_on_host(plan, group, optimizer.state.get(member.param, {}), machine)
        key = (id(plan), known)
        if key not in made:
            split = split_case(plan, known.__contains__)
            made[key] = late_case(plan, split, known) if is_late else split
        out.append(made[key])
    return out


def split_case(planned: PlannedCase, on_host: Callable[[str], bool]) -> PlannedCase:
    """Return ``planned`` with what the host can compute moved into its host case.

    Args:
        planned: the case and its calls.
        on_host: whether the host knows the scalar of this name without waiting.

    Raises:
        CodegenError: something that the host keeps depends on a value of the device.
    """
    case = planned.case
    roots = [store.value for store in case.stores] + list(case.sums)
    known = _known_to_host(roots, on_host)
    device: list[Store] = []
    host: list[Store] = []
    for store in case.stores:
        if on_host(store.buffer) and store.value not in known:
            raise CodegenError(
                f"fuse-updates: {store.buffer.removeprefix('number.')!r} is kept on the host and "
                "computed from values of the device, for which the host would have to wait."
            )
        is_argument = store.buffer.startswith("number.arg.") and store.value in known
        (host if on_host(store.buffer) or is_argument else device).append(store)
    replaced, sent = _replacements([s.value for s in device] + list(case.sums), known)
    values = substitute([store.value for store in device], replaced)
    sums = substitute(case.sums, replaced)
    on_device = tuple(Store(s.buffer, v) for s, v in zip(device, values, strict=True))
    return replace(
        planned,
        case=Case(on_device, tuple(sums), case.temps, case.early),  # type: ignore[arg-type]
        host=Case((*host, *sent)),
    )


def late_case(planned: PlannedCase, split: PlannedCase, known: frozenset[str]) -> PlannedCase:
    """Return ``planned`` split so that the device counts what the host keeps in its state.

    The host counts too, as if no step were skipped, and says from where to where.

    Args:
        planned: the case.
        split: how it is split otherwise.
        known: the scalars that the host knows.
    """
    kept = {store.buffer: store.value for store in split.host.stores if _is_state(store.buffer)}
    if not kept:
        return split
    roots = [store.value for store in planned.case.stores] + list(planned.case.sums)
    found = [e for e in postorder(roots) if isinstance(e, Scalar) and e.name in kept]
    counted: dict[Expr, Expr] = {
        e: cast(scalar(LATE + state_key(e.name), "f64"), e.dtype) for e in found
    }
    values = substitute(roots, counted)
    stores = tuple(
        Store(LATE + state_key(s.buffer), cast(v, "f64"))
        if s.buffer in kept
        else Store(s.buffer, v)
        for s, v in zip(planned.case.stores, values, strict=False)
    )
    sums = tuple(values[len(stores) :])
    on_device = replace(planned, case=replace(planned.case, stores=stores, sums=sums))  # type: ignore[arg-type]
    late = split_case(on_device, (known - kept.keys()).__contains__)
    told = []
    for name, value in kept.items():
        told.append(Store(SEEN + state_key(name), cast(scalar(name, value.dtype), "f64")))
        told.append(Store(NEXT + state_key(name), cast(value, "f64")))
    own = tuple(Store(name, value) for name, value in kept.items())
    return replace(late, host=Case((*own, *late.host.stores, *told)), late=tuple(kept))


def state_key(name: str) -> str:
    """Return the key in the state that the scalar ``name`` stands for."""
    return name.removeprefix("number.").removeprefix("state.")


def _is_state(name: str) -> bool:
    return name.startswith(("state.", "number.state."))


def names_on_host(
    planned: PlannedCase, group: Mapping[str, Any], state: Mapping[str, Any], machine: Machine
) -> frozenset[str]:
    """Return the scalars of ``planned`` that the host knows without waiting."""
    tensors = group_tensors(group)
    found = {
        leaf.name
        for leaf in leaves(planned.case)
        if isinstance(leaf, Scalar) and leaf.name.startswith(("number.", "group."))
    }
    found |= {store.buffer for store in planned.case.stores if _is_number_of_state(store.buffer)}
    found -= {name for name, tensor in tensors.items() if not machine.on_host(tensor)}
    found.discard(OWN_FACTOR)  # norms read it before the host does its part
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and machine.on_host(value):
            found.add(f"state.{key}")
    return frozenset(found)


def _is_number_of_state(name: str) -> bool:
    return name.startswith("number.state.")


def _known_to_host(roots: list[Expr], on_host: Callable[[str], bool]) -> set[Expr]:
    known: set[Expr] = set()
    for expr in postorder(roots):
        if isinstance(expr, Scalar):
            is_known = on_host(expr.name)
        else:
            is_known = isinstance(expr, Constant)
            is_known |= isinstance(expr, Apply) and all(arg in known for arg in expr.args)
        known |= {expr} if is_known else set()
    return known


def _replacements(roots: list[Expr], known: set[Expr]) -> tuple[dict[Expr, Expr], list[Store]]:
    """Return what the device reads in place of what the host computes, and the host's stores."""
    wanted = [root for root in roots if root in known]
    replaced: dict[Expr, Expr] = {}
    for expr in postorder(roots):
        if expr not in known:
            wanted += [arg for arg in expr.args if arg in known]
            if isinstance(expr, Scalar) and expr.name.startswith("group."):
                replaced[expr] = scalar(ON_DEVICE + expr.name, expr.dtype)
    sent: list[Store] = []
    for expr in dict.fromkeys(wanted):
        if any(isinstance(item, Scalar) for item in postorder([expr])):
            name = f"number.host.{len(sent)}"
            replaced[expr] = scalar(name, expr.dtype)
            sent.append(Store(name, expr))
    return replaced, sent


def keeps_state(host: Case) -> bool:
    """Whether the host changes state of its own, which a skip on the device could not undo."""
    sent = ("number.host.", "number.arg.")
    return any(not store.buffer.startswith(sent) for store in host.stores)
