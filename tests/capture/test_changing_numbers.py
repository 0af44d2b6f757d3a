"""Python numbers that change from call to call: whole steps are not compiled anew for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.graph.roles import GraphKind
from tests.steps import compile_step

CALLS = 6


class Trainer:
    """Trains a small model; keeps the numbers that steps change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.weight, self.calls = 0.0, 0
        self.history = {"mean": 1.0}

    def loss(self, x: Any) -> Any:
        return self.model(x).square().mean()

    def penalty(self) -> Any:
        return self.model[0].weight.abs().sum()

    def train(self, loss: Any) -> Any:
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()


def argument(run: Trainer, x: Tensor, number: float) -> Any:
    return run.train(run.loss(x) + 0.1 * number * run.penalty())


def attribute(run: Trainer, x: Tensor, number: float) -> Any:
    run.weight += 0.1
    return run.train(run.loss(x) + run.weight * run.penalty())


def count(run: Trainer, x: Tensor, number: float) -> Any:
    run.calls += 1
    return run.train(run.loss(x) / (run.calls + 1))


def temperature(run: Trainer, x: Tensor, number: float) -> Any:
    return run.train(F.cross_entropy(run.model(x) / (number + 1), torch.arange(4)))


def bounds(run: Trainer, x: Tensor, number: float) -> Any:
    bound = 0.1 * number + 0.1
    return run.train(run.model(x).clamp(-bound, bound).square().mean())


def behind_the_update(run: Trainer, x: Tensor, number: float) -> Any:
    loss = run.train(run.loss(x))
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(1 - 0.001 * number)
    return loss


def running_mean_of_the_loss(run: Trainer, x: Tensor, number: float) -> Any:
    loss = run.train(run.loss(x) * run.history["mean"])
    run.history["mean"] = 0.9 * run.history["mean"] + 0.1 * loss.item()
    return loss


def bound_of_the_norm(run: Trainer, x: Tensor, number: float) -> Any:
    loss = run.loss(x)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1 * (number + 1))
    run.opt.step()
    run.opt.zero_grad()
    return loss.detach()


def interpolation(run: Trainer, x: Tensor, number: float) -> Any:
    loss = run.train(run.loss(x))
    return torch.lerp(loss, loss * 2, 0.1 * number)


def exponent(run: Trainer, x: Tensor, number: float) -> Any:
    return run.train((run.model(x).square() + 1).pow(0.1 * number + 0.5).mean())


Step = Callable[[Trainer, Tensor, float], Any]
STEPS = (argument, attribute, count, temperature, bounds, behind_the_update,
         running_mean_of_the_loss, bound_of_the_norm, interpolation)  # fmt: skip


def run_both(step: Step, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Return losses and parameters of eager and of ours, and the compiled step."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 6) for _ in range(CALLS)]
    eager, ours = Trainer(), Trainer()
    compiled = compile_step(step, **options)
    found: tuple[list[Any], list[Any]] = ([], [])
    for index, x in enumerate(batches):
        found[0].append(step(eager, x, float(index)))
        found[1].append(compiled(ours, x, float(index)))
    for trainer, values in zip((eager, ours), found, strict=True):
        values += [*(param.detach() for param in trainer.model.parameters()), trainer.weight]
        values += [trainer.calls, trainer.history["mean"]]
    return *found, compiled


@pytest.mark.parametrize("step", STEPS)
def test_two_graphs_serve_all_values(step: Step) -> None:
    expected, found, compiled = run_both(step, dtype="float32", disable=["fuse-updates"])
    assert all(map(_equal, expected, found))
    assert len(last_report(compiled).whole) == 2
    assert last_report(compiled).breaks == []


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


def test_number_that_an_op_looks_at_is_right_too() -> None:
    """It is a constant of each graph, up to torch 2.13."""
    expected, found, _ = run_both(exponent, dtype="float32", disable=["fuse-updates"])
    assert all(map(_equal, expected, found))


@pytest.mark.parametrize("step", [attribute, bounds, running_mean_of_the_loss])
def test_regions_serve_all_values_too(step: Step) -> None:
    expected, found, compiled = run_both(step, dtype="float32", capture="regions")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kinds = [region.kind for region in last_report(compiled).regions]
    assert kinds.count(GraphKind.TRAINING) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("step", [argument, running_mean_of_the_loss])
def test_sixteen_bits_stay_near_float32(step: Step, dtype: str) -> None:
    expected, found, compiled = run_both(step, dtype=dtype)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=0.02, atol=0.005)
    assert len(last_report(compiled).whole) == 2


def test_inductor_takes_them_too() -> None:
    expected, found, compiled = run_both(bounds, dtype="float32", lowering="inductor")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(last_report(compiled).whole) == 2


def test_number_that_only_a_decomposition_looks_at_is_left_to_torch() -> None:
    """Inductor's form of ``lerp`` branches on the weight, from torch 2.13 on."""
    expected, found, _ = run_both(interpolation, dtype="float32", lowering="inductor")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
