"""An update that alone reads means gets the 16-bit sums as they are on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile.backend import last_report
from mpcompile.distributed import group as group_module
from mpcompile.runtime.update import OptimizerUpdate
from tests.distributed import jobs
from tests.distributed.ranks import Ranks
from tests.distributed.test_ddp import check_as_stock
from tests.steps import compile_step

pytestmark = pytest.mark.distributed

WIDE_VALUES = ("f32[510]", "f32[24,12]", "f32[6,24]", "f32[288]", "f32[144]")
"""What ``jobs.Net`` has of gradients in float32: the whole bucket, or the part of a weight."""


@dataclass
class Seen:
    """What a rank saw of gradients between reduction and update.

    Attributes:
        lines: of the graph, from where the first bucket is waited for.
        given: dtype of each gradient of the last update, and bytes of the memory that it is in.
        bucket_bytes: of each bucket.
        num_widened: how many buckets were turned into float32.
        grads: what ``.grad`` is after the last step.
        losses: of the steps.
    """

    lines: list[str] = field(default_factory=list)
    given: list[tuple[torch.dtype, int]] = field(default_factory=list)
    bucket_bytes: list[int] = field(default_factory=list)
    num_widened: int = 0
    grads: list[Tensor | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def watch(rank: int, options: dict[str, object], clears_first: bool = False) -> Seen:
    """Train three clipped steps and look at what is made of gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(jobs.Net())
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = Seen()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        if clears_first:
            opt.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if not clears_first:
            opt.zero_grad()
        return loss.detach()

    original, widen = OptimizerUpdate.run, group_module._widen

    def run(self: Any, grads: Any = None, plan: Any = None) -> Any:
        seen.given = [(grad.dtype, grad.untyped_storage().nbytes()) for grad in grads]
        return original(self, grads, plan)

    def widening(*args: Any) -> None:
        seen.num_widened += 1
        widen(*args)

    compiled = compile_step(step, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerUpdate, "run", run)
        patch.setattr(group_module, "_widen", widening)
        seen.losses = [float(compiled(*jobs.labelled(number, rank))) for number in range(3)]
    report = last_report(compiled)
    (region,) = report.regions
    lines = region.graph.after.splitlines()
    waits = [index for index, line in enumerate(lines) if "mpcompile.receive_bucket" in line]
    seen.lines = lines[waits[0] :]
    seen.bucket_bytes = [bucket.wire_bytes for bucket in report.syncs[0].buckets]
    seen.grads = [p.grad for p in model.parameters()]
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_nothing_in_float32_lies_between_reduction_and_update(
    ranks: Ranks, dtype: str, wire: str
) -> None:
    for seen in ranks.run(watch, {"dtype": dtype, "wire_dtype": wire}):
        made = [line for line in seen.lines if any(value in line for value in WIDE_VALUES)]
        assert not made
        assert seen.given == [(getattr(torch, wire), 2 * 510)] * 6
        assert (seen.bucket_bytes, seen.num_widened) == ([2 * 510], 0)
        assert seen.grads == [None] * 6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_hands_out_buckets_as_they_are(ranks: Ranks, dtype: str) -> None:
    options: dict[str, object] = {"lowering": "inductor", "dtype": dtype}
    for seen in ranks.run(watch, {**options, "wire_dtype": "float16"}):
        assert seen.given == [(torch.float16, 2 * 510)] * 6
        assert seen.num_widened == 0


def test_gradients_that_stay_are_widened(ranks: Ranks) -> None:
    for seen in ranks.run(watch, {"wire_dtype": "float16"}, True):
        assert any("f32[24,12]" in line for line in seen.lines)
        assert seen.num_widened == 3
        assert all(grad is not None and grad.dtype is torch.float32 for grad in seen.grads)


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_dropped_gradients_stay_on_the_wire_and_none_is_left(ranks: Ranks, wire: str) -> None:
    options: dict[str, object] = {"wire_dtype": wire, "grads": "drop"}
    found, last = (ranks.run(watch, options, clears_first) for clears_first in (True, False))
    for seen, expected in zip(found, last, strict=True):
        assert seen.given == [(getattr(torch, wire), 2 * 510)] * 6
        assert (seen.num_widened, seen.grads) == (0, [None] * 6)
        assert seen.losses == expected.losses


# --- right numbers -------------------------------------------------------------------------------


def clearing_first(job: jobs.Job, rank: int) -> jobs.Training:
    """Clear, train, clip, as most loops are written."""
    model = jobs.wrap(job, jobs.Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        return loss.detach()

    return jobs.Training(step, [model], jobs.labelled)


def small_buckets(job: jobs.Job, rank: int) -> jobs.Training:
    """A module of six buckets whose gradients are of very different sizes, clipped by value."""
    model = jobs.wrap(job, jobs.Net(), bucket_cap_mb=0.0001)
    with torch.no_grad():
        model.module.readout.weight.mul_(1e-3)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return jobs.Training(step, [model], jobs.labelled)


def one_optimizer(job: jobs.Job, rank: int) -> jobs.Training:
    """Two wrapped modules, and a weight of each rank's own, in one optimizer."""
    one, other = jobs.wrap(job, nn.Linear(12, 12)), jobs.wrap(job, jobs.Net())
    own = nn.Parameter(torch.ones(12))
    opt = torch.optim.SGD([*one.parameters(), own, *other.parameters()], lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(other(torch.tanh(one(x))), labels) + (own * x).sum().square() * 1e-4
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return jobs.Training(step, [one, other], jobs.labelled)


def images(job: jobs.Job, rank: int) -> jobs.Training:
    """A convolution whose weight, and so its gradient, has its channels last."""
    convolution = nn.Conv2d(3, 4, 2)
    weight = convolution.weight.detach().contiguous(memory_format=torch.channels_last)
    convolution.weight = nn.Parameter(weight)
    net = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(4, 6))
    model = jobs.wrap(job, net)
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x.view(8, 3, 2, 2)), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return jobs.Training(step, [model], jobs.labelled)


@pytest.mark.parametrize("build", [small_buckets, one_optimizer, images])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_updates_of_all_kinds_train_as_stock(ranks: Ranks, build: jobs.Build, wire: str) -> None:
    found = check_as_stock(ranks, build, wire)
    assert len(found[0].report.whole) == 1


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_optimizers_own_step_gets_true_gradients(ranks: Ranks, wire: str) -> None:
    found = check_as_stock(ranks, jobs.plain, wire, options={"disable": ["fuse-updates"]})
    assert len(found[0].report.whole) == 1


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_dropped_gradients_train_as_stock(ranks: Ranks, wire: str) -> None:
    check_as_stock(ranks, clearing_first, wire, num_steps=6, options={"grads": "drop"})


# --- overflows -----------------------------------------------------------------------------------


def overflow(rank: int, error_feedback: bool, bad: float) -> tuple[int, list[Tensor]]:
    """Train on gradients that grow to where their float16 sum overflows; nobody sees them.

    Returns:
        How many buckets were sent again; by what each step changed the parameters, in units of the
        change that the mean gradient makes.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4, bias=False))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor, slope: Tensor) -> Tensor:
        loss: Tensor = (model(x) * slope).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(
        step, dtype="float32", wire_dtype="float16", error_feedback=error_feedback, check="off"
    )
    changes = []
    weight = model.module.weight
    for number, size in enumerate((1e-7, 5e4, 1e6, 1e5)):
        with torch.no_grad():
            weight.zero_()
        slope = torch.full((4,), size)
        if number == 2 and rank == 1:
            slope[0] *= bad
        compiled(torch.ones(1, 8) * (1 + rank), slope)
        changes.append(weight.detach() / (-1.5 * size))
    assert last_report(compiled).whole
    return last_report(compiled).syncs[0].num_resent, changes


@pytest.mark.parametrize("error_feedback", [False, True])
def test_sum_that_overflows_is_sent_again_in_float16(ranks: Ranks, error_feedback: bool) -> None:
    one, other = ranks.run(overflow, error_feedback, 1.0)
    assert one[0] == other[0] == 1
    for change, there in zip(one[1], other[1], strict=True):
        assert torch.equal(change, there)
        torch.testing.assert_close(change, torch.ones(4, 8), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_gradients_beside_one_that_is_not_finite_are_right(
    ranks: Ranks, error_feedback: bool
) -> None:
    for num_resent, changes in ranks.run(overflow, error_feedback, math.inf):
        assert num_resent == 2
        assert changes[2][0].isinf().all()
        for change in (changes[2][1:], changes[3]):
            torch.testing.assert_close(change, torch.ones_like(change), rtol=2e-3, atol=0.0)
