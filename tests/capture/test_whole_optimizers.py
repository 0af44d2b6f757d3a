"""Every optimizer that updates are fused for trains a whole step as eager does, for 20 steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.runtime.test_update import CASES
from tests.steps import compile_step

STEPS = 20


def train(name: str, **options: Any) -> tuple[list[float], list[Tensor], Any]:
    """Return losses, parameters and the step after ``STEPS`` steps; eager without options."""
    optimizer, arguments = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4))
    params = [p for p in model.parameters() if p.dim() == 2 or name != "muon"]
    opt = optimizer(params, **copy.deepcopy(arguments))
    batches = [(torch.randn(16, 6), torch.randint(4, (16,))) for _ in range(STEPS)]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = compile_step(step, **options) if options else step
    losses = [float(run(x, labels)) for x, labels in batches]
    return losses, [param.detach() for param in model.parameters()], run


@pytest.mark.parametrize("name", CASES)
def test_unfused_whole_step_is_eager_to_the_last_bit(name: str) -> None:
    losses, params, _ = train(name)
    found, ours, step = train(name, dtype="float32", disable=["fuse-updates"])
    assert last_report(step).whole
    assert found == losses
    for param, other in zip(params, ours, strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("name", CASES)
def test_fused_whole_step_follows_eager(name: str) -> None:
    losses, params, _ = train(name)
    found, ours, step = train(name, dtype="float32")
    assert last_report(step).whole
    assert found == pytest.approx(losses, rel=1e-5)
    for param, other in zip(params, ours, strict=True):
        torch.testing.assert_close(other, param, rtol=1e-4, atol=1e-6)
