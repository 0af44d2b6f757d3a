"""What models hold: tied, frozen, sparse and unused parameters, buffers, dropout, own functions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.patterns.registry import ROUNDED_TWICE, network, pair, pattern
from tests.programs import Program


def _program(model: Any, batch: Any = pair, **options: Any) -> Program:
    opt = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **options
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], batch)


@pattern()
def tied_parameters() -> Program:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return _program(model)


@pattern()
def tied_between_calls() -> Program:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    program = _program(model)

    def before(call: int) -> None:
        if call == 2:
            model[2].weight = model[0].weight

    program.before = before
    return program


@pattern()
def frozen_parameters() -> Program:
    model = network()
    model[0].requires_grad_(False)
    return _program(model)


@pattern()
def frozen_parameters_in_the_optimizer() -> Program:
    model = network()
    program = _program(model)
    model[0].requires_grad_(False)
    return program


@pattern()
def frozen_and_unfrozen_between_calls() -> Program:
    model = network()
    program = _program(model)
    program.before = lambda call: model[0].requires_grad_(call not in (1, 2)) and None
    return program


@pattern()
def unfrozen_later() -> Program:
    model = network()
    program = _program(model)
    program.before = lambda call: model[0].requires_grad_(call >= 2) and None
    return program


@pattern()
def unused_parameters() -> Program:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return _program(model)


class Branching(nn.Module):
    """Uses one of two layers, by a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if self.first else self.b(x)
        return out


@pattern()
def parameters_used_by_turns() -> Program:
    model = Branching()
    program = _program(model)

    def before(call: int) -> None:
        model.first = call % 2 == 0

    program.before = before
    return program


@pattern()
def parameters_used_by_turns_zeroed() -> Program:
    model = Branching()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    def before(call: int) -> None:
        model.first = call % 2 == 0

    return Program(step, model, [opt], pair, before)


@pattern(whole=False)
def sparse_embedding() -> Program:
    torch.manual_seed(0)
    model = nn.Embedding(20, 3, sparse=True)
    opt = torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        return torch.arange(5) + call, pair(call)[1]

    return Program(step, model, [opt], batch)


@pattern()
def embedding_with_padding() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6, padding_idx=0, max_norm=None), nn.Linear(6, 3))

    def batch(call: int) -> tuple[Tensor, Tensor]:
        return torch.arange(5) * call % 20, pair(call)[1]

    return _program(model, batch)


@pattern()
def embedding_that_renorms() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6, max_norm=1.0), nn.Linear(6, 3))

    def batch(call: int) -> tuple[Tensor, Tensor]:
        return torch.arange(5) * call % 20, pair(call)[1]

    return _program(model, batch)


@pattern()
def dropout() -> Program:
    torch.manual_seed(0)
    return _program(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))


@pattern()
def dropout_in_evaluation_by_turns() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    program = _program(model)

    def before(call: int) -> None:
        model.train(call % 2 == 0)

    program.before = before
    return program


@pattern(tolerance=ROUNDED_TWICE)
def noise_in_the_step() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(torch.randn_like(param), alpha=0.01)
        opt.step()
        opt.zero_grad()
        return loss.detach() + torch.rand(())

    return Program(step, model, [opt], pair)


@pattern()
def batch_norm() -> Program:
    torch.manual_seed(0)
    return _program(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


class Scale(torch.autograd.Function):
    """Doubles; its gradient is three times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 6 + x * 1e-3


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Scale.apply(x)  # type: ignore[no-untyped-call]
        return out


@pattern()
def own_function() -> Program:
    torch.manual_seed(0)
    return _program(nn.Sequential(nn.Linear(6, 8), Scaled(), nn.Linear(8, 3)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pattern()
def checkpointed_layer() -> Program:
    torch.manual_seed(0)
    return _program(nn.Sequential(Checkpointed(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)))


@pattern()
def checkpointed_dropout() -> Program:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU())
    return _program(nn.Sequential(Checkpointed(inner), nn.Linear(8, 3)))


class Views(nn.Module):
    """Views, in-place ops, a buffer that counts, an attribute that counts."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        out = x @ self.weight.view(6, 3) * self.calls
        out[:, 0] *= 2
        out[1:].relu_()
        return out.t().contiguous().t()


@pattern()
def views_and_writes_in_place() -> Program:
    torch.manual_seed(0)
    return _program(Views())


@pattern()
def parametrized_weight() -> Program:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    return _program(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3)))


@pattern()
def spectral_norm_of_old() -> Program:
    torch.manual_seed(0)
    layer = nn.utils.spectral_norm(nn.Linear(6, 8))
    return _program(nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 3)))


@pattern()
def parameters_of_other_dtypes() -> Program:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 8)
            self.outer = nn.Linear(8, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.outer(self.inner(x).double()).float()
            return out

    return _program(Mixed())


@pattern()
def parameter_with_other_strides() -> Program:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(2, 4, 3, padding=1), flat=nn.Flatten(), out=nn.Linear(24, 3))
    )
    model.to(memory_format=torch.channels_last)

    def batch(call: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(5, 2, 2, 3, generator=generator)
        return x.contiguous(memory_format=torch.channels_last), pair(call)[1]

    program = _program(model, batch)
    return program


@pattern()
def functional_parameters() -> Program:
    torch.manual_seed(0)
    weights = nn.ParameterDict({"w": torch.randn(6, 3), "b": torch.zeros(3)})
    opt = torch.optim.SGD(weights.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(x @ weights["w"] + weights["b"], y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, weights, [opt], pair)


@pattern()
def functional_call() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {name: param * 0.9 for name, param in model.named_parameters()}
        loss = F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(tolerance=ROUNDED_TWICE)
def buffer_that_averages() -> Program:
    model = network()
    model.register_buffer("mean", torch.zeros(3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.mse_loss(out, y + model.mean)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return loss.detach()

    return Program(step, model, [opt], pair)
