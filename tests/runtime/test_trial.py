"""A kernel is compared with the optimizer's own step on copies before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpcompile.codegen import aten_rules
from mpcompile.runtime import update as update_module
from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime.updating import parameters, relative_difference, set_grads

aten = torch.ops.aten


class Langevin(torch.optim.Optimizer):
    """SGD with noise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                p.add_(torch.randn_like(p), alpha=group["lr"])


class OwnReferences(torch.optim.SGD):
    """SGD over the tensors that it was made with, not over those in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.mine:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def _run_beside_eager(cls: Any, steps: int = 4, **options: Any) -> tuple[float, OptimizerUpdate]:
    """Return how far fused and eager parameters are apart, random numbers being the same."""
    lists = [parameters(), parameters()]
    eager, fused = (cls(params, **options) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(steps):
        set_grads(step, *lists)
        torch.manual_seed(step)
        eager.step()
        torch.manual_seed(step)
        update.run()
    return relative_difference(*lists), update


def test_noise_runs_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "_warned", set())
    with pytest.warns(UserWarning, match="Langevin runs as eager.*random numbers"):
        difference, update = _run_beside_eager(Langevin)
    assert difference == 0.0
    assert "on a trial" in update.reason


def test_step_over_references_of_its_own_runs_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "_warned", set())
    with pytest.warns(UserWarning, match="OwnReferences runs as eager"):
        difference, _ = _run_beside_eager(OwnReferences)
    assert difference == 0.0


def test_wrong_rule_runs_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "_warned", set())
    right = aten_rules.POINTWISE[aten.addcdiv.default]
    wrong = lambda x, a, b, value: right(x, b, a, value)  # noqa: E731
    monkeypatch.setitem(aten_rules.POINTWISE, aten.addcdiv.default, wrong)
    with pytest.warns(UserWarning, match="Adam runs as eager.*another 'param'"):
        difference, _ = _run_beside_eager(torch.optim.Adam)
    assert difference == 0.0


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_right_kernel_passes_and_random_numbers_stay(weight_decay: float) -> None:
    difference, update = _run_beside_eager(torch.optim.AdamW, weight_decay=weight_decay)
    assert difference <= 1e-6
    assert update.reason == ""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    set_grads(9, update.optimizer.param_groups[0]["params"])
    update.prepared.clear()
    update._tried.clear()
    assert update.run().fused
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_that_are_not_finite_do_not_fail_the_trial() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params)
    set_grads(0, params)
    optimizer.step()
    update = OptimizerUpdate(optimizer)
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    assert update.run().fused
    assert params[0].isnan().all()
