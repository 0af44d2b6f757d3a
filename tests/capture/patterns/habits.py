"""What people add to a plain step: averages, gradient surgery, schedules, reparametrised layers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils

from tests.capture.patterns.registry import ROUNDED_TWICE, network, pair, pattern
from tests.programs import Program

Action = Callable[[Any, Any], Any]


def _nothing(model: Any, opt: Any) -> None:
    pass


def _build(
    make: Callable[[], Any] = network,
    edit: Action = _nothing,
    after: Callable[[Any, Any], Callable[[], Any]] = lambda model, opt: lambda: None,
    between: Callable[[Any, Any, int], Any] = lambda model, opt, call: None,
    batch: Callable[[int], tuple[Any, ...]] = pair,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> Callable[[], Program]:
    """Return what builds a step with one thing added.

    Args:
        make: makes the model.
        edit: what is done to gradients.
        after: of model and optimizer, returns what is done after the update.
        between: what is done before call ``call``.
        batch: from the number of a call to its arguments.
        loss: the loss.
    """

    def build() -> Program:
        torch.manual_seed(0)
        model = make()
        params = [p for p in model.parameters() if p.requires_grad]
        opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        finish = after(model, opt)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
            opt.zero_grad()
            value = loss(model(x), y)
            value.backward()
            edit(model, opt)
            opt.step()
            return value.detach(), finish()

        program = Program(step, model, [opt], batch)
        program.before = lambda call: between(model, opt, call) and None
        return program

    return build


def _average(**options: Any) -> Callable[[Any, Any], Callable[[], Any]]:
    def after(model: Any, opt: Any) -> Callable[[], Any]:
        average = swa_utils.AveragedModel(model, **options)

        def update() -> list[Tensor]:
            average.update_parameters(model)
            return [param.clone() for param in average.parameters()]

        return update

    return after


def _average_of_names(model: Any, opt: Any) -> Callable[[], Any]:
    average = {name: param.detach().clone() for name, param in model.named_parameters()}

    def update() -> Any:
        for name, param in model.named_parameters():
            average[name] = average[name] * 0.9 + param.detach() * 0.1
        return dict(average)

    return update


def _warmed_average(model: Any, opt: Any) -> Callable[[], Any]:
    average, calls = [p.detach().clone() for p in model.parameters()], [0]

    @torch.no_grad()
    def update() -> list[Tensor]:
        calls[0] += 1
        decay = min(0.99, (1 + calls[0]) / (10 + calls[0]))
        for old, new in zip(average, model.parameters(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)
        return [old.clone() for old in average]

    return update


def _every_second(model: Any, opt: Any) -> Callable[[], Any]:
    scheduler, calls = lr_scheduler.StepLR(opt, 1, 0.5), [0]

    def update() -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            scheduler.step()

    return update


def _decay_rate(model: Any, opt: Any) -> Callable[[], Any]:
    def update() -> Any:
        for group in opt.param_groups:
            group["lr"] *= 0.9
        return opt.param_groups[0]["lr"]

    return update


def _evaluate(model: Any, opt: Any) -> Callable[[], Any]:
    def update() -> Tensor:
        model.eval()
        with torch.no_grad():
            value: Tensor = model(torch.ones(2, 6)).sum()
        model.train()
        return value

    return update


def _slow_weights(model: Any, opt: Any) -> Callable[[], Any]:
    slow, calls = [p.detach().clone() for p in model.parameters()], [0]

    @torch.no_grad()
    def update() -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            for kept, param in zip(slow, model.parameters(), strict=True):
                kept.add_(param - kept, alpha=0.5)
                param.copy_(kept)

    return update


def _halve(model: Any, opt: Any) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def _add_noise(model: Any, opt: Any) -> None:
    for param in model.parameters():
        param.grad += torch.randn_like(param.grad) * 0.01


def _clip_each(model: Any, opt: Any) -> None:
    for param in model.parameters():
        torch.nn.utils.clip_grad_norm_([param], 0.05)


def _clip_by_size(model: Any, opt: Any) -> None:
    for param in model.parameters():
        size, bound = param.grad.norm(), param.detach().norm().clamp(min=1e-3) * 0.1
        param.grad.mul_(torch.where(size > bound, bound / size, torch.ones_like(size)))


def _centralise(model: Any, opt: Any) -> None:
    for param in model.parameters():
        if param.dim() > 1:
            param.grad.add_(-param.grad.mean(dim=1, keepdim=True))


def _signs(model: Any, opt: Any) -> None:
    for param in model.parameters():
        param.grad = param.grad.sign() * param.grad.abs().mean()


def _normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def _symmetric() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Linear(6, 3))


def _pruned() -> nn.Module:
    model: nn.Module = network()
    prune.l1_unstructured(model[0], "weight", 0.3)  # type: ignore[index]
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def _frozen() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 3))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    return model


def _thaw(model: Any, opt: Any, call: int) -> None:
    if 0 < call < 4:
        layer = model[3 - call].requires_grad_(True)
        opt.add_param_group({"params": list(layer.parameters()), "lr": 0.01})


def _set_momentum(model: Any, opt: Any, call: int) -> None:
    model[1].momentum = 0.1 / (call + 1)


def _save_and_load(model: Any, opt: Any, call: int) -> None:
    if call == 2:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        kept = torch.load(file)
        model.load_state_dict(kept["model"])
        opt.load_state_dict(kept["opt"])


def _copy_both(model: Any, opt: Any, call: int) -> None:
    if call == 2:
        copy.deepcopy(model)
        copy.deepcopy(opt)


def _sum_of_squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum()


WHOLE: dict[str, dict[str, Any]] = {
    "average_by_names": {"after": _average_of_names},
    "average_with_warmup": {"after": _warmed_average},
    "rate_decayed_after_and_read": {"after": _decay_rate},
    "evaluation_in_mode_eval_after": {"make": lambda: _normed(nn.BatchNorm1d(8), nn.Dropout(0.2)),
                                      "after": _evaluate},
    "slow_weights": {"after": _slow_weights},
    "gradients_halved": {"edit": _halve},
    "gradients_with_noise": {"edit": _add_noise},
    "gradients_clipped_each": {"edit": _clip_each},
    "gradients_clipped_by_size_of_weights": {"edit": _clip_by_size},
    "gradients_centralised": {"edit": _centralise},
    "gradients_as_signs": {"edit": _signs},
    "spectral_norm": {"make": lambda: _normed(parametrizations.spectral_norm(nn.Linear(8, 8)))},
    "orthogonal_weight": {"make": lambda: _normed(
        parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"))},
    "own_parametrization": {"make": _symmetric},
    "pruned_weight": {"make": _pruned},
    "complex_parameter": {"make": Complex},
    "thawed_layer_by_layer": {"make": _frozen, "between": _thaw},
    "momentum_of_a_norm_changes": {"make": lambda: _normed(nn.BatchNorm1d(8)),
                                   "between": _set_momentum},
    "saved_and_loaded": {"between": _save_and_load},
    "copied": {"between": _copy_both},
    "batches_that_are_empty": {"batch": lambda call: pair(call, (5, 0, 3, 0)[call]),
                               "loss": _sum_of_squares},
}  # fmt: skip
IN_REGIONS: dict[str, dict[str, Any]] = {
    "average_of_swa_utils": {"after": _average()},
    "average_of_swa_utils_exponential": {
        "after": _average(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))},
    "scheduler_every_second_call": {"after": _every_second},
}  # fmt: skip
TOLERANCES = {
    "spectral_norm": 1e-4,  # the kernel depends on where a vector lies, with stock backends too
    "average_with_warmup": ROUNDED_TWICE,
    "average_of_swa_utils_exponential": ROUNDED_TWICE,
}

for _name, _options in {**WHOLE, **IN_REGIONS}.items():
    _rounded = TOLERANCES.get(_name, 0.0)
    pattern(f"habit_{_name}", whole=_name in WHOLE, tolerance=_rounded)(_build(**_options))


@pattern("habit_curvature_by_two_grads")
def _curvature() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        along = torch.stack([(g * g.detach()).sum() for g in grads]).sum()
        curved = torch.autograd.grad(along, params)
        for param, grad, curve in zip(params, grads, curved, strict=True):
            param.grad = (grad + 0.1 * curve).detach()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern("habit_gradients_of_each_sample")
def _each_sample() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, params, (x[None],)), y[None])

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {name: param.detach() for name, param in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        for name, param in model.named_parameters():
            scale = (0.1 / (grads[name].flatten(1).norm(dim=1) + 1e-6)).clamp(max=1)
            param.grad = torch.einsum("b,b...->...", scale, grads[name]) / x.shape[0]
        opt.step()
        return torch.stack([g.sum() for g in grads.values()]).sum()

    return Program(step, model, [opt], pair)
