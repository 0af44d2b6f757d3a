"""Programs that scale their loss, by hand or with GradScaler: ours makes up for the rest.

Scaled twice, ten or more steps would overflow first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.steps import Classifier, batch, compile_step

SCALE = 4096.0
Step = Callable[[Tensor, Tensor], Tensor]


def build(kind: str) -> tuple[Step, Any, Any]:
    """Return a step that scales as ``kind`` says, its model and its scaler."""
    torch.manual_seed(0)
    model: Any = Classifier()
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=kind != "disabled scaler")

    def by_hand(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        (loss * SCALE).backward()
        for param in params:
            param.grad.div_(SCALE)
        nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def by_grad(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels) / (1 / SCALE)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad / SCALE
        nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        opt.zero_grad()
        return loss.detach() / SCALE

    def by_scaler(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    steps = {"by hand": by_hand, "autograd.grad": by_grad}
    return steps.get(kind, by_scaler), model, scaler


@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("kind", ["by hand", "autograd.grad", "scaler", "disabled scaler"])
def test_program_that_scales_its_loss_loses_no_step(kind: str, capture: str) -> None:
    step, model, scaler = build(kind)
    plain, _, _ = build(kind)
    compiled = compile_step(step, dtype="float16", capture=capture)
    for _ in range(3):
        found = compiled(*batch())
        assert not bool(mpcompile.skipped(compiled))
        torch.testing.assert_close(found, plain(*batch()), rtol=5e-3, atol=0.0)
    before = [param.detach().clone() for param in model.parameters()]
    x, labels = batch()
    spoilt = x.clone()
    spoilt[0, 0] = float("nan")
    compiled(spoilt, labels)
    assert bool(mpcompile.skipped(compiled))
    assert all(map(torch.equal, model.parameters(), before))
    record = mpcompile.last_report(compiled).loss_scale
    assert record is not None
    assert record.own_scale == (1.0 if kind == "disabled scaler" else SCALE)
    if kind == "scaler":
        assert scaler.get_scale() == SCALE / 2
    torch.testing.assert_close(compiled(x, labels), plain(x, labels), rtol=5e-3, atol=0.0)


def test_losses_that_are_scaled_apart_share_the_least() -> None:
    """An update unscales by one number, whichever loss its gradients come from."""
    torch.manual_seed(0)
    models: list[Any] = [Classifier(), Classifier()]
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(())
        for model, opt, scale in zip(models, opts, (16.0, 1.0), strict=True):
            loss = F.cross_entropy(model(x), labels)
            (loss * scale).backward()
            for param in model.parameters():
                param.grad.div_(scale)
            opt.step()
            opt.zero_grad()
            total = total + loss.detach()
        return total

    compiled = compile_step(step, dtype="float16", loss_scale=1024, check="off")
    losses = [float(compiled(*batch())) for _ in range(4)]
    torch.manual_seed(0)
    models[:] = [Classifier(), Classifier()]
    opts[:] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    assert losses == pytest.approx([float(step(*batch())) for _ in range(4)], rel=5e-3)
    record = mpcompile.last_report(compiled).loss_scale
    assert record is not None
    assert record.own_scale == 1.0


def test_scaler_and_our_scale_fall_and_grow_together() -> None:
    """What a step that the scaler left out has noted does not count against the next one."""
    step, model, scaler = build("scaler")
    scaler.set_growth_interval(2)
    compiled = compile_step(step, dtype="float16", growth_interval=2)
    x, labels = batch()
    found = []
    for factor in (1.0, 1.0, float("nan"), 1.0, float("inf"), 1.0, 1.0, 1.0):
        before = model.readout.bias.detach().clone()
        compiled(x * factor, labels)
        scale = mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"]
        moved = not torch.equal(model.readout.bias, before)
        found.append((moved, scaler.get_scale() / SCALE, scale / 65536.0))
    assert [moved for moved, _, _ in found] == [True, True, False, True, False, True, True, True]
    assert [theirs for _, theirs, _ in found] == [1.0, 2.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    assert [ours for _, _, ours in found] == [theirs for _, theirs, _ in found]
