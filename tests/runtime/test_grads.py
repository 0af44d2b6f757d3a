"""Unscaling, clipping and skipping inside the update."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from mpcompile.runtime import dispatch
from mpcompile.runtime import prepared as prepared_module
from mpcompile.runtime.grads import NORM_EPSILON, ClipNorm, ClipValue, GradPlan, clip_coefficient
from mpcompile.runtime.update import OptimizerUpdate
from mpcompile.runtime.updates import Updates
from tests.runtime.updating import parameters, relative_difference, set_grads, with_factors


def _run(plan: GradPlan, eager_clip: Any, steps: int = 4, scale: float = 1.0) -> tuple[Any, Any]:
    """Return (eager, fused) parameters after steps with ``eager_clip`` and with ``plan``."""
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(steps):
        set_grads(step, *lists)
        for param in lists[1]:
            param.grad.mul_(scale)  # type: ignore[union-attr]  # just set
        norm = eager_clip(lists[0])
        pair[0].step()
        outcome = update.run(plan=plan)
        if norm is not None:
            assert outcome.norm is not None
            # Eager adds up in f32: its own error grows with the number of elements.
            torch.testing.assert_close(outcome.norm, norm, rtol=1e-5, atol=0.0)
        if plan.write:
            for a, b in zip(*lists, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-30)
    return lists[0], lists[1]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("bound", [0.5, 1e6])
def test_clip_by_norm(order: float, bound: float, write: bool) -> None:
    plan = GradPlan(clips=(ClipNorm(bound, order),), write=write)
    pair = _run(plan, lambda ps: torch.nn.utils.clip_grad_norm_(ps, bound, order))
    assert relative_difference(*pair) <= 1e-6


def test_clip_by_value_then_norm_of_unscaled_gradients() -> None:
    def clip(params: Any) -> torch.Tensor:
        torch.nn.utils.clip_grad_value_(params, 0.7)
        return torch.nn.utils.clip_grad_norm_(params, 2.0)

    plan = GradPlan(factor=1 / 1024, clips=(ClipValue(0.7), ClipNorm(2.0)), write=True)
    assert relative_difference(*_run(plan, clip, scale=1024.0)) <= 1e-6


@pytest.mark.parametrize("clips", [(), (ClipNorm(0.5),), (ClipValue(0.7), ClipNorm(2.0))])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("fused", [True, False])
def test_sixteen_bit_gradients_with_a_factor_each_are_read_as_their_products(
    clips: tuple[ClipNorm | ClipValue, ...], factor: float, fused: bool
) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    update.reason = "" if fused else "on request"
    for step in range(3):
        factors = [2.0 ** (row - step) for row in range(len(lists[0]))]
        grads = with_factors(lists[0], step, factors, factor)
        eager_norm = None
        for clip in clips:
            if isinstance(clip, ClipNorm):
                eager_norm = torch.nn.utils.clip_grad_norm_(lists[0], clip.max_norm)
            else:
                torch.nn.utils.clip_grad_value_(lists[0], clip.value)
        pair[0].step()
        plan = GradPlan(factor=factor, clips=clips, own_factors=tuple(factors))
        outcome = update.run(grads, plan)
        assert (outcome.norm is None) == (eager_norm is None)
        if eager_norm is not None:
            torch.testing.assert_close(outcome.norm, eager_norm, rtol=1e-5, atol=0.0)
    assert outcome.fused == fused
    assert relative_difference(*lists) <= 1e-6


def test_unwritten_gradients_stay_as_they_were() -> None:
    params = parameters()
    update = OptimizerUpdate(torch.optim.AdamW(params))
    for step in range(3):
        set_grads(step, params)
        before = [param.grad.clone() for param in params]  # type: ignore[union-attr]  # just set
        update.run(plan=GradPlan(clips=(ClipNorm(0.1),)))
        for param, grad in zip(params, before, strict=True):
            assert torch.equal(param.grad, grad)  # type: ignore[arg-type]  # just set


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_norm_of_huge_gradients_does_not_overflow(value: float) -> None:
    params = parameters(((1000,), (7, 3)))
    update = OptimizerUpdate(torch.optim.SGD(params, lr=0.1))
    for param in params:
        param.grad = torch.full_like(param, value)
    outcome = update.run(plan=GradPlan(clips=(ClipNorm(1.0),)))
    expected = value * math.sqrt(1021)
    assert outcome.norm is not None
    if expected < 3.4e38:
        assert outcome.norm.item() == pytest.approx(expected, rel=1e-6)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_do_what_they_do_in_eager(bad: float) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(3):
        set_grads(step, *lists)
        if step == 2:
            for params in lists:
                params[1].grad[3] = bad  # type: ignore[index]  # just set
        torch.nn.utils.clip_grad_norm_(lists[0], 1.0)
        pair[0].step()
        update.run(plan=GradPlan(clips=(ClipNorm(1.0),)))
    for a, b in zip(*lists, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert (
        relative_difference([a.nan_to_num() for a in lists[0]], [b.nan_to_num() for b in lists[1]])
        <= 1e-6
    )


def test_skip_leaves_everything() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    update = OptimizerUpdate(optimizer)
    for step in range(2):
        set_grads(step, params)
        update.run()
    before = [p.detach().clone() for p in params]
    outcome = update.run(plan=GradPlan(skip=torch.ones(())))
    assert outcome.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_eager_fallback_treats_gradients_the_same_way() -> None:
    plan = GradPlan(factor=0.5, clips=(ClipNorm(0.5),), write=True)

    def clip(params: Any) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(params, 0.5)

    lists = _run(plan, clip, steps=1, scale=2.0)  # the first step is the optimizer's own
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_drives_the_update(fused: bool) -> None:
    updates, lists = Updates(), [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01, fused=fused) for params in lists]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in pair]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    compiled = torch.compile(lambda: scalers[1].step(pair[1]), backend="eager")
    for step in range(6):
        set_grads(step, *lists)
        for params in lists:
            for param in params:
                param.grad.mul_(scalers[0].get_scale())  # type: ignore[union-attr]  # just set
            if step == 3:
                params[0].grad[0] = torch.inf  # type: ignore[index]  # just set
        scalers[0].step(pair[0])
        with dispatch.running(updates.run):
            compiled()
        for scaler in scalers:
            scaler.update()
    (record,) = updates.records()
    assert record.kernels
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.3, 1.0, 7.123456, 3e8, 1e39, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [1.0, 0.1, 5, 1e-3])
def test_coefficient_is_what_torch_computes(norm: float, max_norm: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.tensor(norm, dtype=dtype)
        want = torch.clamp(max_norm / (tensor + NORM_EPSILON), max=1.0).item()
        found = clip_coefficient(tensor, max_norm)
        assert found == want or (math.isnan(found) and math.isnan(want))


@pytest.mark.parametrize(("order", "name"), [(2.0, "norm"), (math.inf, "norm of order inf")])
def test_norm_is_a_kernel_of_the_record(order: float, name: str) -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    set_grads(0, params)
    update = OptimizerUpdate(optimizer)
    update.run(plan=GradPlan(clips=(ClipNorm(1.0, order),)))
    norm, kernel = update.record().kernels
    elements = sum(p.numel() for p in params)
    assert norm.name == f"gradient {name}"
    assert "double lane0[LANES]" in norm.source
    assert (norm.num_tensors, norm.bytes_read, norm.bytes_written) == (5, 4 * elements, 0)
    assert kernel.name.startswith("SGD")
    assert kernel.bound_s > norm.bound_s > 0


def test_gradients_are_not_kept_after_the_update() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    update = OptimizerUpdate(optimizer)
    for step in range(3):
        set_grads(step, params)
        update.run()
    grad = weakref.ref(params[0].grad)
    optimizer.zero_grad(set_to_none=True)
    assert grad() is None


@pytest.mark.parametrize("can_read", [True, False])
def test_gradients_that_come_and_go_are_seen(
    can_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "can_read_grads", lambda: can_read)
    lists = [parameters(), parameters()]
    eager, fused = (torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in lists)
    update = OptimizerUpdate(fused)
    for step, missing in enumerate([(), (), (1,), (1,), (), (0, 3), (), ()]):
        set_grads(step, *lists)
        for params in lists:
            for position in missing:
                params[position].grad = None
        eager.step()
        update.run()
    assert relative_difference(*lists) <= 1e-6
    assert update.num_prepared <= 4


def test_gradient_of_another_layout_is_seen() -> None:
    lists = [parameters(((6, 4),)), parameters(((6, 4),))]
    eager, fused = (torch.optim.SGD(params, lr=0.1) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(6):
        set_grads(step, *lists)
        for params in lists if step % 2 else ():
            params[0].grad = torch.ones(4, 6).t()
        eager.step()
        assert update.run().fused
    assert relative_difference(*lists) <= 1e-6
