"""Hooks on parameters, their gradient accumulators, modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program


def _sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _program(
    *, optimizer_clears: bool = False, make: Callable[[Any], Optimizer] = _sgd
) -> tuple[Any, Optimizer, Program]:
    model = network()
    opt = make(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        if optimizer_clears:
            opt.zero_grad()
        else:
            model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return model, opt, Program(step, model, [opt], pair)


def _at(program: Program, actions: dict[int, Callable[[], Any]]) -> Program:
    """Have ``program`` run ``actions[call]`` before that call."""
    program.before = lambda call: actions[call]() if call in actions else None
    return program


def _double(grad: Tensor) -> Tensor:
    return grad * 2


@pattern(whole=False)
def hook_of_a_parameter() -> Program:
    model, _, program = _program()
    model[0].weight.register_hook(_double)
    return program


@pattern(whole=False)
def hook_of_a_parameter_that_notes() -> Program:
    model, _, program = _program()
    sums: dict[str, float] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: sums.update({name: float(grad.sum())}))
    program.before = lambda call: program.log.append(sorted(sums.items()))
    return program


@pattern(whole=False)
def hook_of_a_parameter_added_later() -> Program:
    model, _, program = _program()
    return _at(program, {2: lambda: model[0].weight.register_hook(_double)})


@pattern(whole=False)
def hook_of_a_parameter_added_later_where_nothing_is_updated() -> Program:
    model = network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return _at(Program(step, model, [], pair), {2: lambda: model[0].weight.register_hook(_double)})


@pattern(whole=False)
def hook_of_a_parameter_added_later_and_removed() -> Program:
    model, _, program = _program()
    handles: list[Any] = []
    actions: dict[int, Callable[[], Any]] = {
        2: lambda: handles.append(model[0].weight.register_hook(_double)),
        3: lambda: handles[0].remove(),
    }
    return _at(program, actions)


@pattern(whole=False)
def hook_of_a_parameter_removed() -> Program:
    model, _, program = _program()
    handle = model[0].weight.register_hook(_double)
    return _at(program, {2: handle.remove})


@pattern(whole=False)
def hook_of_a_parameter_added_inside() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        handle = model[0].weight.register_hook(_double)
        loss.backward()
        handle.remove()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def hook_after_accumulation() -> Program:
    model, _, program = _program()

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)
    return program


@pattern(whole=False)
def hook_after_accumulation_added_later() -> Program:
    model, _, program = _program()

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    return _at(program, {2: lambda: model[0].weight.register_post_accumulate_grad_hook(halve)})


@pattern(whole=False)
def optimizer_in_the_backward() -> Program:
    model = network()
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(param: Tensor) -> None:
        opts[param].step()
        opts[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return Program(step, model, list(opts.values()), pair)


@pattern()
def hook_of_an_activation() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        hidden = model[0](x)
        hidden.register_hook(_double)
        loss = F.mse_loss(model[1:](hidden), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def hook_of_an_activation_that_notes() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    program = Program(lambda: None, model, [opt], pair)

    def note(grad: Tensor) -> None:
        program.log.append(grad.shape)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        hidden = model[0](x)
        hidden.register_hook(note)
        loss = F.mse_loss(model[1:](hidden), y)
        loss.backward()
        opt.step()
        return loss.detach()

    program.step = step
    return program


@pattern()
def hooks_of_modules() -> Program:
    model, _, program = _program()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[2].register_forward_hook(lambda module, args, out: out + 1)
    model[1].register_forward_hook(lambda module, args, out: program.log.append(out.shape))
    return program


@pattern()
def hook_of_a_module_added_later() -> Program:
    model, _, program = _program()
    return _at(
        program, {2: lambda: model[2].register_forward_hook(lambda module, args, out: out * 2)}
    )


@pattern(whole=False)
def backward_hooks_of_modules() -> Program:
    model, _, program = _program()
    model[2].register_full_backward_hook(lambda module, ins, outs: program.log.append("back"))
    model[1].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 2,))
    return program


@pattern(whole=False)
def backward_hook_of_a_module_added_later() -> Program:
    model, _, program = _program()

    def note(*args: Any) -> None:
        program.log.append("back")

    return _at(program, {2: lambda: model[1].register_full_backward_hook(note)})


def _scale_gradients(opt: Optimizer, args: Any, kwargs: Any) -> None:
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)


@pattern()
def hooks_of_the_optimizer() -> Program:
    _, opt, program = _program()
    opt.register_step_pre_hook(_scale_gradients)
    opt.register_step_post_hook(lambda *args: program.log.append("after"))
    return program


class CallsItsBase(torch.optim.Adam):
    """Runs the hooks of steps in its own step and again in the one that this calls."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pattern(whole=False)
def hooks_of_an_optimizer_that_calls_the_step_of_its_base() -> Program:
    torch.optim.Adam([torch.zeros(1)])  # a class's step runs hooks once it was used
    _, opt, program = _program(optimizer_clears=True, make=lambda p: CallsItsBase(p, lr=1e-2))

    def add() -> None:
        opt.register_step_pre_hook(_scale_gradients)
        opt.register_step_pre_hook(lambda *args: program.log.append("before"))
        opt.register_step_post_hook(lambda *args: program.log.append("after"))

    return _at(program, {2: add})


@pattern()
def hook_before_the_update_added_later() -> Program:
    _, opt, program = _program()
    return _at(program, {2: lambda: opt.register_step_pre_hook(_scale_gradients)})


@pattern()
def hook_after_the_update_added_later_and_removed() -> Program:
    _, opt, program = _program(optimizer_clears=True)
    handles: list[Any] = []

    def note(*args: Any) -> None:
        program.log.append("after")

    def add() -> None:
        handles.append(opt.register_step_post_hook(note))

    return _at(program, {1: add, 2: lambda: handles[0].remove()})


@pattern()
def hooks_of_all_optimizers_added_later() -> Program:
    _, _, program = _program()
    handles: list[Any] = []

    def note(*args: Any) -> None:
        program.log.append("after")

    def add() -> None:
        handles.append(register_optimizer_step_post_hook(note))

    return _at(program, {1: add, 2: lambda: handles[0].remove()})


@pattern()
def group_added_where_the_model_clears() -> Program:
    model = network()
    opt = torch.optim.Adam(model[0].parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    program = Program(step, model, [opt], pair)

    def add() -> None:
        opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})

    return _at(program, {2: add})


@pattern()
def parameter_removed_where_the_model_clears() -> Program:
    _, opt, program = _program()

    def remove() -> None:
        param = opt.param_groups[0]["params"].pop(1)
        del opt.state[param]

    return _at(program, {2: remove})


@pattern()
def parameters_reordered_where_the_model_clears() -> Program:
    _, opt, program = _program()
    return _at(program, {2: lambda: opt.param_groups[0]["params"].reverse()})
