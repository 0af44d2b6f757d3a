"""float16 on several ranks: an overflow that one rank alone sees is a step that all leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpcompile
from tests.distributed import jobs
from tests.distributed.ranks import Ranks
from tests.steps import compile_step

pytestmark = pytest.mark.distributed

Seen = tuple[bool, bool, float]


class Training:
    """A wrapped model, and beside it a weight of each rank's own, whose gradient is the input's."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(jobs.Net())
        self.own = nn.Parameter(torch.ones(3))
        self.opt = torch.optim.AdamW([*self.model.parameters(), self.own], lr=0.01)
        self.compiled = compile_step(self.step, dtype="float16", **options)

    def step(self, x: Tensor, labels: Tensor, slope: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), labels) + (self.own * slope).sum()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def run(self, number: int, rank: int, slope: float) -> Seen:
        """Take a step; whether parameters stood still, whether it is told so, the scale after."""
        before = [p.detach().clone() for p in self.opt.param_groups[0]["params"]]
        self.compiled(*jobs.labelled(number, rank), torch.full((3,), slope))
        after = self.opt.param_groups[0]["params"]
        stood_still = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        scale = mpcompile.state_dict(self.compiled)["loss_scale"]["cpu"]["scale"]
        return stood_still, bool(mpcompile.skipped(self.compiled)), scale


def overflow_on_rank_1(rank: int, options: dict[str, object]) -> tuple[list[Seen], str, float]:
    training = Training(**options)
    bad = float("inf") if rank == 1 else 1.0
    seen = [training.run(number, rank, bad if number == 2 else 1.0) for number in range(4)]
    record = mpcompile.last_report(training.compiled).loss_scale
    assert record is not None
    if not options:
        assert mpcompile.last_report(training.compiled).whole
    total = sum(p.detach().double().sum().item() for p in training.model.parameters())
    return seen, record.first, total


def run_out_of_inputs(rank: int) -> int:
    """Rank 0 goes on alone after rank 1 has run out of batches."""
    training = Training()
    num_steps = 4 - 2 * rank
    with training.model.join():
        seen = [training.run(number, rank, 1.0) for number in range(num_steps)]
    return sum(not skipped for _, skipped, _ in seen)


def train_apart(rank: int) -> list[bool]:
    """Steps under ``no_sync`` are each rank's own, and so are their overflows."""
    training = Training()
    slope = float("inf") if rank == 1 else 1.0
    training.run(0, rank, 1.0)
    with training.model.no_sync():
        return [training.run(number, rank, slope)[1] for number in range(1 + rank)]


@pytest.mark.parametrize(
    "options", [{}, {"disable": ["fuse-updates"], "capture": "regions"}], ids=["kernel", "graph"]
)
def test_overflow_of_one_rank_that_does_not_travel_skips_the_step_on_both(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    one, other = ranks.run(overflow_on_rank_1, options)
    good, skipped = (False, False, 65536.0), (True, True, 32768.0)
    assert one[0] == other[0] == [good, good, skipped, (False, False, 32768.0)]
    assert one[2] == other[2]
    assert one[1] == ""  # the rank that did not see it does not name what another step did
    assert other[1] != ""


def test_rank_that_goes_on_alone_under_join_waits_for_nobody(ranks: Ranks) -> None:
    assert ranks.run(run_out_of_inputs) == [4, 2]


def test_ranks_that_do_not_average_decide_alone(ranks: Ranks) -> None:
    assert ranks.run(train_apart) == [[False], [True, True]]
