"""Steps with closures in float16: the optimizer's own step runs, and is taken back if need be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.steps import batch, compile_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adam of lists": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
}
IN_REGIONS: dict[str, Any] = {"capture": "regions", "disable": "fuse-updates"}


def build(make: Callable[[Any], torch.optim.Optimizer], normed: bool = True) -> Any:
    """Return a model, its optimizer and a step that hands it a closure."""
    torch.manual_seed(0)
    norm: nn.Module = nn.BatchNorm1d(32) if normed else nn.Identity()
    model = nn.Sequential(nn.Linear(16, 32), norm, nn.GELU(), nn.Linear(32, 8))
    opt = make(model.parameters())

    def step(x: Tensor, labels: Tensor) -> Any:
        def closure() -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            return loss

        return opt.step(closure)

    return model, opt, step


def everything(model: nn.Module, opt: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def spoilt() -> tuple[Tensor, Tensor]:
    x, labels = batch()
    x = x.clone()
    x[0, 0] = float("nan")
    return x, labels


@pytest.mark.parametrize("options", [{}, IN_REGIONS], ids=["whole", "regions"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overflow_in_a_closure_leaves_every_tensor_as_it_was(
    name: str, options: dict[str, Any]
) -> None:
    model, opt, step = build(OPTIMIZERS[name])
    compiled = compile_step(step, dtype="float16", **options)
    for _ in range(2):
        compiled(*batch())
    before = everything(model, opt)
    compiled(*spoilt())
    assert bool(mpcompile.skipped(compiled))
    assert_equal(everything(model, opt), before)
    assert mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"] == 32768.0
    compiled(*batch())
    assert not bool(mpcompile.skipped(compiled))
    assert not torch.equal(model[0].weight, before[0]["0.weight"])


def test_step_with_a_closure_learns_as_in_float32() -> None:
    _, _, half = build(OPTIMIZERS["AdamW"])
    compiled = compile_step(half, dtype="float16")
    _, _, plain = build(OPTIMIZERS["AdamW"])
    for _ in range(4):
        found, expected = compiled(*batch()), plain(*batch())
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=0.0)
    assert any("f16" in region.aten_after for region in mpcompile.last_report(compiled).regions)


def test_first_step_with_a_closure_can_be_skipped() -> None:
    model, opt, step = build(OPTIMIZERS["AdamW"])
    compiled = compile_step(step, dtype="float16")
    before = everything(model, opt)
    compiled(*spoilt())
    assert_equal(everything(model, opt), before)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


@pytest.mark.parametrize("excluded", [False, True])
def test_lbfgs_is_put_back_with_all_its_history_and_statistics(excluded: bool) -> None:
    """Also where the closure is no graph of ours: NaN is an overflow in float32 too."""
    model, opt, step = build(lbfgs)
    if excluded:
        model.forward = torch.compiler.disable(model.forward)
    compiled = compile_step(step, dtype="float16")
    for _ in range(2):
        compiled(*batch())
    before = everything(model, opt)
    compiled(*spoilt())
    assert_equal(everything(model, opt), before)
    loss = compiled(*batch())
    assert loss < compiled(*batch()) * 2
    assert loss.isfinite()
    assert int(model[1].num_batches_tracked) > int(before[0]["1.num_batches_tracked"])


def test_closure_of_lbfgs_is_compiled() -> None:
    _, _, step = build(lbfgs)
    compiled = compile_step(step, dtype="float16")
    _, _, plain = build(lbfgs)
    losses = [compiled(*batch()) for _ in range(3)]  # those that the first closure call gave
    torch.testing.assert_close(losses[0], plain(*batch()), rtol=5e-3, atol=0.0)
    assert losses[2] < losses[1] < losses[0]
    assert any("f16" in region.aten_after for region in mpcompile.last_report(compiled).regions)


def test_statistics_go_back_with_their_own_optimizer_alone() -> None:
    models, steps = [], []
    for _ in range(2):
        model, _, step = build(lbfgs)
        models.append(model)
        steps.append(step)

    def both(good: Any, bad: Any) -> None:
        steps[0](*good)
        steps[1](*bad)

    compiled = compile_step(both, dtype="float16")
    compiled(batch(), batch())
    before = [copy.deepcopy(model.state_dict()) for model in models]
    compiled(batch(), spoilt())
    assert_equal(models[1].state_dict(), before[1])
    assert not torch.equal(models[0][1].running_mean, before[0]["1.running_mean"])


def test_bfloat16_step_with_a_closure_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpcompile.runtime import updates

    monkeypatch.setattr(updates, "remember", None)
    _, _, step = build(OPTIMIZERS["SGD"])
    compile_step(step)(*batch())
