"""Steps whose backward, after an update, goes through values from before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.patterns.registry import pair, pattern
from tests.programs import Program


def trunk_and_heads() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    """Return a trunk with two heads, and an optimizer for each of the three."""
    torch.manual_seed(0)
    parts = {
        "trunk": nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
        "first": nn.Linear(8, 3),
        "second": nn.Linear(8, 3),
    }
    model = nn.ModuleDict(parts)
    return model, [torch.optim.Adam(part.parameters(), lr=1e-2) for part in model.children()]


@pattern()
def gan_that_judges_one_fake_twice() -> Program:
    torch.manual_seed(0)
    make = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    judge = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    model = nn.ModuleDict({"make": make, "judge": judge})
    opts = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (make, judge)]

    def step(x: Tensor, y: Tensor) -> Any:
        fake = make(x)
        judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(y)).mean()
        opts[1].zero_grad()
        judged.backward()
        opts[1].step()
        made = F.softplus(-judge(fake)).mean()
        opts[0].zero_grad()
        made.backward()
        opts[0].step()
        return (judged + made).detach()

    return Program(step, model, opts, pair)


@pattern()
def second_loss_of_a_trunk_after_the_first_head_is_updated() -> Program:
    model, opts = trunk_and_heads()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for opt in opts:
            opt.zero_grad()
        hidden = model["trunk"](x)
        first = F.mse_loss(model["first"](hidden), y)
        second = F.l1_loss(model["second"](hidden), y)
        first.backward(retain_graph=True)
        opts[1].step()
        second.backward()
        opts[0].step()
        opts[2].step()
        return first.detach(), second.detach()

    return Program(step, model, opts, pair)


@pattern(tolerance=1e-6)  # gradients of two losses are added up in another order
def trunk_gone_back_through_twice_after_updates() -> Program:
    model, opts = trunk_and_heads()
    deeper = nn.Sequential(model["trunk"], nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    model["trunk"], opts[0] = deeper, torch.optim.Adam(deeper.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Any:
        for opt in opts:
            opt.zero_grad()
        hidden = model["trunk"](x)
        F.mse_loss(model["first"](hidden.detach()), y).backward()
        opts[1].step()
        F.l1_loss(model["second"](hidden), y).backward(retain_graph=True)
        opts[2].step()
        loss = hidden.square().mean()
        loss.backward()
        opts[0].step()
        return loss.detach()

    return Program(step, model, opts, pair)


@pattern(tolerance=1e-6)  # the sum of three gradients, in another order
def backward_across_two_updates() -> Program:
    model, opts = trunk_and_heads()
    scale = nn.Parameter(torch.ones(8))
    model.register_parameter("scale", scale)
    opts.append(torch.optim.SGD([scale], lr=1e-2))

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = model["trunk"](x)
        F.mse_loss(model["first"](hidden.detach()), y).backward()
        opts[1].step()
        scaled = hidden * scale + model["first"](hidden).mean()
        F.l1_loss(model["second"](scaled.detach()), y).backward()
        opts[2].step()
        loss = F.mse_loss(model["second"](scaled), y) + hidden.square().mean()
        loss.backward()
        opts[0].step()
        opts[3].step()
        for opt in opts:
            opt.zero_grad()
        return loss.detach()

    return Program(step, model, opts, pair)


@pattern()
def parameter_used_before_and_after_the_update_of_another() -> Program:
    model, opts = trunk_and_heads()

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = model["trunk"](x)
        F.mse_loss(model["first"](hidden.detach()), y).backward()
        opts[1].step()
        again = model["trunk"](x + 1)
        loss = F.mse_loss(model["second"](hidden * again), y)
        loss.backward()
        opts[0].step()
        opts[2].step()
        for opt in opts:
            opt.zero_grad()
        return loss.detach()

    return Program(step, model, opts, pair)


@pattern()
def gradient_of_a_value_from_before_an_update() -> Program:
    model, opts = trunk_and_heads()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        hidden = model["trunk"](x)
        F.mse_loss(model["first"](hidden.detach()), y).backward()
        opts[1].step()
        loss = F.mse_loss(model["second"](hidden), y)
        params = list(model["trunk"].parameters())
        grads = torch.autograd.grad(loss, [hidden, *params])
        for param, grad in zip(params, grads[1:], strict=True):
            param.grad = grad
        opts[0].step()
        for opt in opts:
            opt.zero_grad()
        return loss.detach(), grads[0].norm()

    return Program(step, model, opts, pair)


def backward_through_a_parameter_that_has_changed() -> Program:
    model, opts = trunk_and_heads()

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = model["trunk"](x)
        middle = model["first"](hidden)
        F.mse_loss(middle, y).backward(retain_graph=True)
        opts[1].step()
        loss = middle.square().mean()
        loss.backward()  # needs the weight of before the update
        opts[0].step()
        return loss.detach()

    return Program(step, model, opts, pair)


@pattern(whole=False)
def gradient_penalty_across_an_update() -> Program:
    model, opts = trunk_and_heads()

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = model["trunk"](x)
        F.mse_loss(model["first"](hidden.detach()), y).backward()
        opts[1].step()
        loss = F.mse_loss(model["second"](hidden), y)
        (slope,) = torch.autograd.grad(loss, [hidden], create_graph=True)
        (loss + slope.square().sum()).backward()
        opts[0].step()
        opts[2].step()
        for opt in opts:
            opt.zero_grad()
        return loss.detach()

    return Program(step, model, opts, pair)
