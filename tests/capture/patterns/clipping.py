"""How steps clip gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program


def _clipped(clip: object, zero_first: bool = False) -> Program:
    """Return a program that calls ``clip(model)`` between backward and update."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert callable(clip)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, object]:
        if zero_first:
            opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = clip(model)
        opt.step()
        if not zero_first:
            opt.zero_grad()
        return loss.detach(), norm

    return Program(step, model, [opt], pair)


@pattern()
def clip_by_norm() -> Program:
    def clip(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    return _clipped(clip)


@pattern()
def clip_by_norm_with_visible_gradients() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.1), zero_first=True)


@pattern()
def clip_by_norm_that_is_returned() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.1))


@pattern()
def clip_by_norm_as_a_number() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.1).item())


@pattern()
def clip_by_value() -> Program:
    return _clipped(lambda model: clip_grad_value_(model.parameters(), 0.01))


@pattern()
def clip_by_value_with_visible_gradients() -> Program:
    return _clipped(lambda model: clip_grad_value_(model.parameters(), 0.01), zero_first=True)


@pattern()
def clip_by_value_and_norm() -> Program:
    def clip(model: nn.Module) -> Tensor:
        clip_grad_value_(model.parameters(), 0.02)
        return clip_grad_norm_(model.parameters(), 0.05)

    return _clipped(clip)


@pattern()
def clip_by_norm_and_value() -> Program:
    def clip(model: nn.Module) -> None:
        clip_grad_norm_(model.parameters(), 0.2)
        clip_grad_value_(list(model.parameters()), 0.02)

    return _clipped(clip)


@pattern()
def clip_by_norm_twice() -> Program:
    def clip(model: nn.Module) -> tuple[Tensor, Tensor]:
        first = clip_grad_norm_(model.parameters(), 0.2)
        return first, clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0)

    return _clipped(clip)


@pattern()
def clip_by_the_largest_entry() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.05, float("inf")))


@pattern()
def clip_by_norm_of_order_one() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.05, norm_type=1))


@pattern()
def clip_one_parameter() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model[0].weight, 0.05))


@pattern()
def clip_some_parameters() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model[0].parameters(), 0.05))


@pattern()
def clip_parts_apart() -> Program:
    def clip(model: nn.Module) -> list[Tensor]:
        return [clip_grad_norm_(part.parameters(), 0.05) for part in (model[0], model[2])]  # type: ignore[index]

    return _clipped(clip)


@pattern()
def clip_to_nothing() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 0.0))


@pattern()
def clip_nonfinite_gradients() -> Program:
    program = _clipped(lambda model: clip_grad_norm_(model.parameters(), 1.0))

    def batch(call: int) -> tuple[Tensor, Tensor]:
        x, y = pair(call)
        return x, y * torch.inf if call == 3 else y

    program.batch = batch
    return program


@pattern()
def clip_that_would_refuse_nonfinite() -> Program:
    return _clipped(lambda model: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))


@pattern()
def clip_to_a_bound_that_changes() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor, bound: float) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), bound)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), 0.1 / (call + 1)))


@pattern()
def clip_to_a_computed_bound() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), loss.item() * 0.1)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def clip_by_hand() -> Program:
    def clip(model: nn.Module) -> Any:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        scale = (0.1 / (norm + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(scale)
        return norm

    return _clipped(clip)


@pattern(whole=False)
def clip_unless_nonfinite() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if torch.isfinite(clip_grad_norm_(model.parameters(), 0.1)):
            opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        x, y = pair(call)
        return x, y * torch.inf if call == 2 else y

    return Program(step, model, [opt], batch)


@pattern()
def clip_without_gradients() -> Program:
    model, other = network(), network(1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(other.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return loss.detach(), norm

    return Program(step, model, [opt], pair)
