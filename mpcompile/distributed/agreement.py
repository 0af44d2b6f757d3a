"""Find out that ranks disagree: on what a step sends, before it is sent; on parameters after it.

Each compares one number a thing with a single all-reduce of ``(x, -x)`` under MAX, which gives the
largest and the smallest. Only a disagreement, which all ranks then see, costs a second round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from mpcompile.distributed import failures
from mpcompile.distributed.plan import BucketPlan, digest
from mpcompile.errors import SyncError

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_NOTHING = "nothing"


def compare_plans(plan: BucketPlan, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` have the same plan.

    Raises:
        SyncError: they have not, or one of them is gone.
    """
    found = announce(Intent(plan.lines), group, device)
    if not found:
        return
    other = next(rank for rank, item in enumerate(found) if item.lines != found[0].lines)
    here, there = _first_difference(found[0].lines, found[other].lines)
    raise SyncError(
        f"ranks would send different buckets: rank 0 has {here!r}, rank {other} has {there!r}. "
        "Build the same model with the same options and environment on every rank."
    )


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do with others.

    Attributes:
        lines: its collectives, as text; equal on two ranks if they fit.
        is_open: whether it can still do something else.
        replays: whether it will run the step again, eagerly, to compare.
    """

    lines: tuple[str, ...]
    is_open: bool = False
    replays: bool = False


def announce(intent: Intent, group: dist.ProcessGroup, device: torch.device) -> Sequence[Intent]:
    """Tell the other ranks of ``group``; return what each of them intends if that is not the same.

    Raises:
        SyncError: a rank is gone.
    """
    words = digest((*intent.lines, f"replays: {intent.replays}"))
    try:
        if not _differing(torch.tensor([words], device=device), group):
            return ()
        found: list[Intent] = [intent] * group.size()
        dist.all_gather_object(found, intent, group=group)
    except RuntimeError as error:
        raise SyncError(failures.describe("comparing what ranks are to send", error)) from error
    return found


def explain_difference(found: Sequence[Intent]) -> str:
    """Return in which way the ranks whose intents these are differ, and what to do."""
    other = next(rank for rank, item in enumerate(found) if item.lines != found[0].lines)
    here, there = found[0].lines[0], found[other].lines[0]
    if here == there:
        here, there = _first_difference(found[0].lines, found[other].lines)
    return (
        f"ranks are about to run different steps: rank 0 has {here!r}, rank {other} has {there!r}. "
        "A branch that only some ranks take (a print on rank 0, say) was compiled after others had "
        "their step as one graph, and what it sends does not fit. Keep such code out of the "
        "compiled function, or compile with options={'capture': 'regions'} on every rank."
    )


def compare_parameters(
    named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, when: str
) -> None:
    """Check that parameters are the same on all ranks of ``group``, bit for bit.

    Raises:
        SyncError: one differs, or a rank is gone.
    """
    if not named:
        return
    sums = torch.stack([checksum(parameter) for _, parameter in named])
    try:
        differing = _differing(sums, group)
    except RuntimeError as error:
        raise SyncError(failures.describe(f"comparing parameters {when}", error)) from error
    if not differing:
        return
    name, parameter = named[differing[0]]
    raise SyncError(
        f"check_sync {when}: parameter {name} {tuple(parameter.shape)} is the first of "
        f"{len(differing)} of {len(named)} that differ between ranks, so gradients were not "
        "averaged or were changed afterwards on one rank only. Look for code that runs on some "
        "ranks only, for parameters changed after DistributedDataParallel was built, and for "
        "gradients changed before the step; options={'check_sync': 1} tells the first such step."
    )


def agree_on(flag: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``flag``, of bools, set where it is on any rank of ``group``.

    Raises:
        SyncError: a rank is gone.
    """
    number = flag.to(torch.int32, copy=True)
    try:
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise SyncError(failures.describe("agreeing on an overflow", error)) from error
    return number.bool()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over the bits of ``tensor``, int64 and 0-dim; equal for equal bits."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_BITS[flat.element_size()]) if flat.dtype is not torch.bool else flat
    return bits.sum(dtype=torch.int64)


def _differing(numbers: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    both = torch.cat([numbers, -numbers])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = both[: len(numbers)], -both[len(numbers) :]
    found: list[int] = (largest != smallest).nonzero().flatten().tolist()
    return found


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return the first words that differ, each with the head of its line."""
    for here, there in zip_longest(one, other, fillvalue=_NOTHING):
        head = here.partition(":")[0]
        for word, instead in zip_longest(here.split(), there.split(), fillvalue=_NOTHING):
            if word != instead:
                return f"{head}: {word}", f"{head}: {instead}"
    raise AssertionError("digests differ, lines do not")
