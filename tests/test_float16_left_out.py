"""Programs that leave out an update by themselves: the loss scale falls all the same.

Else it would stay where it is, and a program that looks at the norm leaves out every step to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.steps import batch, compile_step

LARGE = 300.0
"""Times the loss: gradients have room for this and a scale of 1024, not of 65536."""


class Guarded:
    """A step that looks at the norm before it updates, and clears gradients at some point."""

    def __init__(self, clears: str, **options: object) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        steps = {"last": self.clears_last, "first": self.clears_first, "behind": self.clears_behind}
        self.compiled = compile_step(steps[clears], dtype="float16", **options)

    def update(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if torch.isfinite(norm):
            self.opt.step()

    def clears_last(self, x: Tensor, labels: Tensor, weight: Tensor) -> None:
        (F.cross_entropy(self.model(x), labels) * weight).backward()
        self.update()
        self.opt.zero_grad()

    def clears_first(self, x: Tensor, labels: Tensor, weight: Tensor) -> None:
        self.opt.zero_grad()
        (F.cross_entropy(self.model(x), labels) * weight).backward()
        self.update()

    def clears_behind(self, x: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Between forward and backward."""
        loss = F.cross_entropy(self.model(x), labels) * weight
        self.opt.zero_grad()
        loss.backward()
        self.update()

    def run(self, weight: float, spoilt: bool = False) -> tuple[bool, float]:
        """Take a step; return whether parameters moved, and the scale behind it."""
        before = self.model[2].weight.detach().clone()
        x, labels = batch()
        self.compiled(x * float("nan") if spoilt else x, labels, torch.tensor(weight))
        scale = mpcompile.state_dict(self.compiled)["loss_scale"]["cpu"]["scale"]
        return not torch.equal(self.model[2].weight, before), scale


@pytest.mark.filterwarnings("ignore:mpcompile. [0-9]+ steps in a row overflowed")
@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("clears", ["last", "first", "behind"])
def test_scale_falls_until_the_program_updates_again(clears: str, capture: str) -> None:
    guarded = Guarded(clears, capture=capture)
    assert [guarded.run(1.0)[0] for _ in range(2)] == [True, True]
    found = [guarded.run(LARGE) for _ in range(14)]
    moved = [moved for moved, _ in found]
    assert not moved[0]
    assert all(moved[-2:])
    falls = moved.index(True)
    assert moved == [False] * falls + [True] * (14 - falls)
    assert found[-1][1] == 65536.0 / 2**falls


def test_statistics_of_an_update_that_was_left_out_go_back() -> None:
    guarded = Guarded("last")
    for _ in range(2):
        guarded.run(1.0)
    before = {name: value.clone() for name, value in guarded.model.state_dict().items()}
    guarded.run(1.0, spoilt=True)
    after = guarded.model.state_dict()
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []


@pytest.mark.parametrize("spoilt", [0, 1])
def test_accumulation_over_calls_is_no_update_left_out(spoilt: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def micro(x: Tensor, labels: Tensor, last: bool) -> None:
        F.cross_entropy(model(x), labels).backward()
        if last:
            opt.step()
            opt.zero_grad()

    compiled: Callable[..., None] = compile_step(micro, dtype="float16", capture="regions")
    for last in (False, True, False, True):
        compiled(*batch(), last)
    before = model.weight.detach().clone()
    x, labels = batch()
    for index in range(3):
        compiled(x * float("nan") if index == spoilt else x, labels, index == 2)
        scale = mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"]
        assert scale == (32768.0 if index == 2 else 65536.0)
    assert torch.equal(model.weight, before)
    compiled(x, labels, True)
    assert not torch.equal(model.weight, before)


def test_statistics_of_two_models_in_one_step_go_back_apart() -> None:
    """One graph serves both, as the code is the same."""
    torch.manual_seed(0)
    models: list[Any] = [nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)) for _ in range(2)]
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def train(model: Any, opt: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
        F.cross_entropy(model(x), labels).backward()
        torch._dynamo.graph_break()
        opt.step()
        opt.zero_grad()

    def step(x: Tensor, y: Tensor, labels: Tensor) -> None:
        train(models[0], opts[0], x, labels)
        torch._dynamo.graph_break()
        train(models[1], opts[1], y, labels)

    compiled = compile_step(step, dtype="float16", capture="regions")
    x, labels = batch()
    compiled(x, x, labels)
    before = [model[1].running_mean.clone() for model in models]
    compiled(x, x * float("nan"), labels)
    assert not torch.equal(models[0][1].running_mean, before[0])
    assert torch.equal(models[1][1].running_mean, before[1])
