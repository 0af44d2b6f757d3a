"""What steps do with optimizers and schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from tests.capture.patterns.registry import ROUNDED_TWICE, network, pair, pattern
from tests.programs import Program
from tests.runtime.optimizers import AdamWithEma, CountsInGroup, CountsItself, Lamb, Lion

After = Callable[[Optimizer], Any]


def _program(
    model: nn.Module, opt: Optimizer, before: Callable[[int], None] = lambda call: None
) -> Program:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair, before)


@pattern()
def optimizers_of_two_parts() -> Program:
    model = network()
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for opt in (first, second):
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return Program(step, model, [first, second], pair)


@pattern()
def optimizers_of_the_same_parameters() -> Program:
    model = network()
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        first.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        first.step()
        second.step()
        return loss.detach()

    return Program(step, model, [first, second], pair)


@pattern()
def optimizer_steps_twice() -> Program:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def optimizer_steps_before_backward() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.step()
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def optimizer_only_every_second_call() -> Program:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    program = Program(lambda: None, model, [opt], pair)
    calls: list[int] = [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        calls[0] += 1
        program.log.append(calls[0])
        if calls[0] % 2 == 0:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    program.step = step
    return program


@pattern()
def gan_with_two_optimizers() -> Program:
    model = nn.ModuleDict({"make": nn.Linear(6, 3), "judge": nn.Linear(3, 1)})
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    make, judge = model["make"], model["judge"]
    opts = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (make, judge)]

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fake = make(x)
        judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(y)).mean()
        opts[1].zero_grad()
        judged.backward()
        opts[1].step()
        made = F.softplus(-judge(make(x))).mean()
        opts[0].zero_grad()
        made.backward()
        opts[0].step()
        return judged.detach(), made.detach()

    return Program(step, model, opts, pair)


@pattern()
def gan_with_one_backward_for_both() -> Program:
    model = nn.ModuleDict({"make": nn.Linear(6, 3), "judge": nn.Linear(3, 1)})
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    make, judge = model["make"], model["judge"]
    opts = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (make, judge)]

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fake = make(x)
        made = F.softplus(-judge(fake)).mean()
        opts[0].zero_grad()
        made.backward(retain_graph=True)
        opts[1].zero_grad()
        judged = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(y)).mean()
        judged.backward()
        opts[0].step()
        opts[1].step()
        return judged.detach(), made.detach()

    return Program(step, model, opts, pair)


@pattern()
def moving_average_of_parameters() -> Program:
    model = network()
    average = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return loss.detach()

    program = Program(step, model, [opt], pair)
    program.extra += list(average.parameters())
    return program


@pattern(tolerance=ROUNDED_TWICE)
def moving_average_as_teacher() -> Program:
    model = network()
    teacher = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @torch.no_grad()
    def follow() -> None:
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(x + 0.1)
        loss = F.mse_loss(model(x), y) + F.mse_loss(model(x), goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow()
        return loss.detach()

    program = Program(step, model, [opt], pair)
    program.extra += list(teacher.parameters())
    return program


@pattern()
def loss_after_the_update() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        with torch.no_grad():
            after = F.mse_loss(model(x), y)
        return loss.detach(), after

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def rate_written_inside() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        for group in opt.param_groups:
            group["lr"] = 0.1 / calls[0]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def rate_given_to_the_step() -> Program:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor, lr: float) -> Tensor:
        opt.param_groups[0]["lr"] = lr
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), 0.1 / (call + 1)))


@pattern()
def rate_written_after_the_update() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        for group in opt.param_groups:
            group["lr"] *= 0.9
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def rate_is_a_tensor_written_inside() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.param_groups[0]["lr"].mul_(0.9)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def rate_written_between_calls() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def before(call: int) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (call + 1)
        opt.param_groups[0]["weight_decay"] = 0.0 if call % 2 else 0.1

    return _program(model, opt, before)


@pattern()
def scheduler_outside() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(opt, 10)

    def before(call: int) -> None:
        if call:
            scheduler.step()

    return _program(model, opt, before)


@pattern(whole=False)
def scheduler_inside() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def scheduler_of_one_cycle() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)

    def before(call: int) -> None:
        if call:
            scheduler.step()

    return _program(model, opt, before)


@pattern()
def scheduler_made_after_compilation() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    made: list[Any] = []

    def before(call: int) -> None:
        if call == 2:
            made.append(lr_scheduler.ExponentialLR(opt, 0.5))
        if call > 2:
            made[0].step()

    return _program(model, opt, before)


@pattern()
def parameters_added_after_compilation() -> Program:
    model = network()
    opt = torch.optim.Adam(model[0].parameters(), lr=0.1)

    def before(call: int) -> None:
        if call == 2:
            opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})

    return _program(model, opt, before)


@pattern()
def parameters_replaced_in_the_group() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(call: int) -> None:
        if call == 2:
            opt.param_groups[0]["params"] = list(model[2].parameters())
        if call == 3:
            opt.param_groups[0]["params"].append(model[0].weight)

    return _program(model, opt, before)


@pattern()
def state_loaded_between_calls() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept: list[Any] = []

    def before(call: int) -> None:
        if call == 2:
            kept.append(copy.deepcopy((opt.state_dict(), model.state_dict())))
        if call == 4:
            opt.load_state_dict(kept[0][0])
            model.load_state_dict(kept[0][1])

    return _program(model, opt, before)


@pattern()
def state_loaded_before_the_first_call() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    program = _program(model, opt)
    for call in range(2):
        program.step(*pair(call))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    return program


@pattern()
def state_cleared() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    return _program(model, opt, lambda call: opt.state.clear() if call == 2 else None)


@pattern()
def data_replaced() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def before(call: int) -> None:
        if call >= 2:
            model[0].weight.data = model[0].weight.data * 0.5

    return _program(model, opt, before)


@pattern()
def parameter_edited_in_place() -> Program:
    model = network()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def before(call: int) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    return _program(model, opt, before)


@pattern()
def parameter_replaced_in_the_model() -> Program:
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(call: int) -> None:
        if call == 2:
            model[0].weight = nn.Parameter(torch.ones(8, 6))

    return _program(model, opt, before)


class Twice(torch.optim.SGD):
    """Calls the step that it inherits, twice."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step()


@pattern()
def subclass_calls_its_base() -> Program:
    model = network()
    return _program(model, Twice(model.parameters(), lr=0.1))


@pattern()
def subclass_with_an_average() -> Program:
    model = network()
    return _program(model, AdamWithEma(model.parameters(), lr=0.1))


class Wrapper:
    """Holds an optimizer, without being one."""

    def __init__(self, opt: Optimizer) -> None:
        self.opt = opt
        self.num_steps = 0

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def step(self) -> None:
        self.num_steps += 1
        self.opt.step()


@pattern()
def optimizer_in_a_wrapper() -> Program:
    model = network()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = Wrapper(opt)
    program = Program(lambda: None, model, [opt], pair)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        wrapper.step()
        wrapper.zero_grad()
        return loss.detach()

    program.step = step
    program.before = lambda call: program.log.append(wrapper.num_steps)
    return program


@pattern(whole=False)
def optimizer_made_inside() -> Program:
    model = network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [], pair)


@pattern()
def optimizer_replaced_between_calls() -> Program:
    model = network()
    opts: list[Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt = opts[0]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def before(call: int) -> None:
        if call == 2:
            opts[0] = torch.optim.AdamW(model.parameters(), lr=0.01)

    return Program(step, model, [], pair, before)


@pattern()
def optimizer_given_to_the_step() -> Program:
    model, other = network(), network(1)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]

    def step(model: nn.Module, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Any, ...]:
        return ((model, other)[call % 2], opts[call % 2], *pair(call))

    program = Program(step, model, opts, batch)
    program.extra += list(other.parameters())
    return program


def _of_kind(name: str, make: Callable[[nn.Module], Optimizer]) -> None:
    def build() -> Program:
        model = network()
        return _program(model, make(model))

    build.__name__ = f"optimizer_{name}"
    pattern()(build)


_KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "adam_amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1),
    "lamb": lambda m: Lamb(m.parameters(), lr=0.1),
    "lion": lambda m: Lion(m.parameters(), lr=0.1),
    "that_counts_in_its_group": lambda m: CountsInGroup(m.parameters(), lr=0.1),
    "that_counts_itself": lambda m: CountsItself(m.parameters(), lr=0.1),
    "with_groups": lambda m: torch.optim.AdamW(
        [
            {"params": m[0].parameters(), "weight_decay": 0.0},  # type: ignore[index]
            {"params": m[2].parameters(), "lr": 0.3, "betas": (0.8, 0.9)},  # type: ignore[index]
        ],
        lr=0.1,
    ),
    "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, maximize=True),
    "capturable": lambda m: torch.optim.Adamax(m.parameters(), lr=0.1),
}
for _name, _make in _KINDS.items():
    _of_kind(_name, _make)
