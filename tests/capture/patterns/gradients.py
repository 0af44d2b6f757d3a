"""What steps do with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.patterns.registry import ROUNDED_TWICE, network, pair, pattern
from tests.programs import Program


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pattern()
def zero_grad_first() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_last() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_both() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(True)
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_first_to_zero() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_last_to_zero() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_to_zero_keeps_the_tensor() -> Program:
    model = network()
    opt = _sgd(model)
    held: list[Any] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        return loss.detach()

    program = Program(step, model, [opt], pair)

    def before(call: int) -> None:
        grads = [p.grad for p in model.parameters()]
        if held:
            program.log.append([a is b for a, b in zip(held, grads, strict=True)])
        if call:
            held[:] = grads

    program.before = before
    return program


@pattern()
def zero_grad_never() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_of_the_model() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        model.zero_grad(set_to_none=False)
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def zero_grad_outside() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    def before(call: int) -> None:
        opt.zero_grad(set_to_none=call % 2 == 0)

    return Program(step, model, [opt], pair, before)


@pattern()
def accumulation_inside() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for rows, targets in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.mse_loss(model(rows), targets) / 3
            loss.backward()
            total += loss.detach()
        opt.step()
        return total

    return Program(step, model, [opt], lambda call: pair(call, 6))


@pattern()
def accumulation_across_calls() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if update:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), call % 2 == 1))


@pattern()
def accumulation_across_calls_to_zero() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if update:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad(set_to_none=False)
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), call % 2 == 1))


@pattern()
def several_losses() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = model(x)
        losses = {"l2": F.mse_loss(out, y), "l1": F.l1_loss(out, y), "size": out.square().mean()}
        sum(losses.values()).backward()
        opt.step()
        opt.zero_grad()
        return {name: loss.detach() for name, loss in losses.items()}

    return Program(step, model, [opt], pair)


@pattern()
def several_backward_calls() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Any:
        out = model(x)
        first, second = F.mse_loss(out, y), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        opt.step()
        opt.zero_grad()
        return first.detach() + second.detach()

    return Program(step, model, [opt], pair)


@pattern()
def backward_of_a_tensor_with_gradient() -> Program:
    model = network()
    opt = _adam(model)

    def step(x: Tensor, y: Tensor) -> Any:
        out = model(x)
        out.backward(out.detach() - y)
        opt.step()
        opt.zero_grad()
        return out.detach()

    return Program(step, model, [opt], pair)


@pattern()
def backward_into_some_inputs() -> Program:
    model = network()
    opt = _sgd(model)
    some = list(model[0].parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward(inputs=some)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def torch_autograd_backward() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Any:
        out = model(x)
        losses = [F.mse_loss(out, y), out.abs().mean()]
        torch.autograd.backward(losses)
        opt.step()
        opt.zero_grad()
        return losses[0].detach()

    return Program(step, model, [opt], pair)


@pattern()
def autograd_grad_then_assigned() -> Program:
    model = network()
    opt = _sgd(model)
    params = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def gradients_set_by_hand() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        model[0].bias.grad = torch.ones_like(model[0].bias)
        model[2].bias.grad = None
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair, lambda call: opt.zero_grad())


@pattern()
def gradients_set_between_calls() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def before(call: int) -> None:
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1) if (call + index) % 2 else None

    return Program(step, model, [opt], pair, before)


@pattern()
def gradients_read() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        size = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        opt.step()
        opt.zero_grad()
        return loss.detach(), torch.as_tensor(size).sqrt()

    return Program(step, model, [opt], pair)


@pattern(tolerance=ROUNDED_TWICE)
def gradients_edited() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
            param.grad.add_(param.detach(), alpha=0.01)
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair, lambda call: opt.zero_grad())


@pattern()
def gradient_data_edited() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data.clamp_(-0.01, 0.01)
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def gradients_held_by_the_caller() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> list[Tensor | None]:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        grads = [param.grad for param in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return grads

    return Program(step, model, [opt], pair)


@pattern()
def gradient_shared_by_two_parameters() -> Program:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3)])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model[0] + model[1] - model[2].t().t(), y)
        loss.backward()
        model[0].grad.mul_(2)
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (pair(call)[1],))


@pattern()
def gradient_is_an_expanded_number() -> Program:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(5, 3), torch.randn(5, 3)])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(y: Tensor) -> Any:
        opt.zero_grad()
        loss = model[0].sum() + (model[1].t() * y.t()).sum()
        loss.backward()
        model[0].grad.mul_(2)
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (pair(call)[1],))


@pattern(whole=torch.__version__ >= "2.12")  # 2.11 breaks at requires_grad_()
def gradient_of_the_input() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        assert x.grad is not None
        return loss.detach(), x.grad

    return Program(step, model, [opt], pair)


@pattern()
def gradient_of_an_input_that_requires_grad() -> Program:
    model = network()
    opt = _sgd(model)
    program = Program(lambda: None, model, [opt])

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        x, y = pair(call)
        program.extra[:] = [t.grad for t in program.extra if t.grad is not None] + [x]
        return x.requires_grad_(), y

    program.step, program.batch = step, batch
    return program


@pattern(whole=torch.__version__ >= "2.12")  # 2.11 breaks at requires_grad_()
def gradient_penalty() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + slope.square().sum(1).sub(1).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def weight_decay_by_hand() -> Program:
    model = network()
    opt = _sgd(model)

    def step(x: Tensor, y: Tensor) -> Any:
        penalty = sum(p.square().sum() for g in opt.param_groups for p in g["params"])
        loss = F.mse_loss(model(x), y) + 1e-3 * penalty
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)
