"""How steps are called: batches, shapes, threads, evaluation in between, other compiled code."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program
from tests.runtime.optimizers import CountsInGroup, CountsItself, Lamb


def _parts() -> tuple[Any, Optimizer]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model: nn.Module, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


@pattern()
def batch_is_a_dict() -> Program:
    model, opt = _parts()

    def step(batch: dict[str, Any]) -> dict[str, Tensor]:
        opt.zero_grad()
        loss = F.mse_loss(model(batch["x"]), batch["labels"]["y"])
        loss.backward()
        opt.step()
        return {"loss": loss.detach(), "x": batch["x"]}

    def batch(call: int) -> tuple[Any, ...]:
        x, y = pair(call)
        return ({"x": x, "labels": {"y": y}, "name": "train"},)

    return Program(step, model, [opt], batch)


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    weight: float = 1.0


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@pattern()
def batch_is_a_dataclass() -> Program:
    model, opt = _parts()

    def step(batch: Batch) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(batch.x), batch.y) * batch.weight
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (Batch(*pair(call)),))


@pattern()
def batch_is_a_named_tuple() -> Program:
    model, opt = _parts()

    def step(batch: Named) -> Named:
        loss = _train(model, opt, batch.x, batch.y)
        return Named(loss, batch.y * 2)

    return Program(step, model, [opt], lambda call: (Named(*pair(call)),))


@pattern()
def batch_changes_its_length() -> Program:
    model, opt = _parts()
    return Program(
        functools.partial(_train, model, opt), model, [opt], lambda call: pair(call, 3 + call)
    )


@pattern()
def batch_is_written_to() -> Program:
    model, opt = _parts()
    program = Program(lambda: None, model, [opt])

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        loss = _train(model, opt, x, y)
        y.add_(loss)
        return loss

    def batch(call: int) -> tuple[Tensor, Tensor]:
        program.extra[:] = pair(call)
        return program.extra[0], program.extra[1]

    program.step, program.batch = step, batch
    return program


@pattern()
def step_has_keywords_and_numbers() -> Program:
    model, opt = _parts()
    program = Program(lambda: None, model, [opt], lambda call: (*pair(call), call))

    def step(x: Tensor, y: Tensor, call: int, *, scale: float = 0.5) -> tuple[Tensor, int]:
        program.log.append(("called", call))
        loss = _train(model, opt, x * scale, y)
        return loss, call + 1

    program.step = step
    return program


class Trainer:
    """A step that is a method, with state of its own."""

    def __init__(self) -> None:
        self.model, self.opt = _parts()
        self.num_steps = 0
        self.last: dict[str, Any] = {}
        self.average = torch.zeros(())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.opt.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.opt.step()
        self.num_steps += 1
        self.last = {"loss": loss.detach(), "step": self.num_steps}
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss.detach()


@pattern()
def step_is_a_method() -> Program:
    trainer = Trainer()
    program = Program(trainer.step, trainer.model, [trainer.opt], pair)

    def before(call: int) -> None:
        program.log.append((trainer.num_steps, dict(trainer.last), trainer.average.clone()))

    program.before = before
    return program


@pattern()
def step_is_partial() -> Program:
    model, opt = _parts()
    return Program(functools.partial(_train, model, opt), model, [opt], pair)


@pattern()
def step_is_nested() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        def losses() -> Tensor:
            return F.mse_loss(model(x), y)

        def update() -> Tensor:
            loss = losses()
            loss.backward()
            opt.step()
            return loss.detach()

        opt.zero_grad()
        return update() + update()

    return Program(step, model, [opt], pair)


@pattern()
def step_keeps_losses_in_a_list() -> Program:
    model, opt = _parts()
    program = Program(lambda: None, model, [opt], pair)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        program.log.append(loss.item())

    program.step = step
    return program


@pattern()
def loss_is_returned_undetached() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        return loss, out

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def value_returned_for_another_backward() -> Program:
    model, opt = _parts()
    program = Program(lambda: None, model, [opt])

    def step(x: Tensor, y: Tensor, kept: list[Tensor]) -> Tensor:
        loss = _train(model, opt, x, y)
        kept.append(model(x).square().mean())
        return loss

    kept: list[Tensor] = []

    def batch(call: int) -> tuple[Any, ...]:
        if kept:
            kept.pop().backward()
            program.log.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return (*pair(call), kept)

    program.step, program.batch = step, batch
    return program


@pattern()
def evaluation_between_calls() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    program = Program(functools.partial(_train, model, opt), model, [opt], pair)

    def before(call: int) -> None:
        model.eval()
        with torch.no_grad():
            program.log.append(model(pair(call)[0]))
        model.train()

    program.before = before
    return program


@pattern()
def evaluation_by_the_same_function() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        if torch.is_grad_enabled():
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        torch.set_grad_enabled(call != 1)
        return pair(call)

    def before(call: int) -> None:
        torch.set_grad_enabled(True)

    return Program(step, model, [opt], batch, before)


@pattern()
def evaluation_inside_the_step() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            first = F.mse_loss(model(x), y)
        return first, _train(model, opt, x, y)

    return Program(step, model, [opt], pair)


@pattern()
def step_turns_gradients_on() -> Program:
    model, opt = _parts()

    @torch.no_grad()
    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        with torch.enable_grad():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        opt.step()
        return loss * 2

    return Program(step, model, [opt], pair)


@pattern()
def eager_training_in_between() -> Program:
    model, opt = _parts()

    def before(call: int) -> None:
        if call % 2:
            _train(model, opt, *pair(call + 50))

    return Program(functools.partial(_train, model, opt), model, [opt], pair, before)


@pattern()
def eager_training_in_another_thread() -> Program:
    model, opt = _parts()
    other = network(1)
    second = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    program = Program(functools.partial(_train, model, opt), model, [opt])
    threads: list[threading.Thread] = []

    def train() -> None:
        for call in range(30):
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            _train(other, second, *pair(call))

    def batch(call: int) -> tuple[Tensor, Tensor]:
        if threads:
            threads.pop().join()
            program.log.append([p.detach().clone() for p in other.parameters()])
        threads.append(threading.Thread(target=train))
        threads[0].start()
        return pair(call)

    program.batch = batch
    return program


@pattern()
def compiled_function_inside() -> Program:
    model, opt = _parts()
    inner: Any = torch.compile(F.mse_loss, backend="aot_eager")

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss: Tensor = inner(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def compiled_model() -> Program:
    model, opt = _parts()
    compiled: Any = torch.compile(model, backend="aot_eager")
    return Program(functools.partial(_train, compiled, opt), model, [opt], pair)


@pattern()
def model_compiled_in_place() -> Program:
    model, opt = _parts()
    model.compile(backend="aot_eager")
    return Program(functools.partial(_train, model, opt), model, [opt], pair)


@pattern()
def compiled_step_of_another_backend_in_between() -> Program:
    model, opt = _parts()
    other: Any = torch.compile(functools.partial(_train, model, opt), backend="aot_eager")

    def before(call: int) -> None:
        other(*pair(call + 50))

    return Program(functools.partial(_train, model, opt), model, [opt], pair, before)


@pattern(whole=False)
def graph_break_before_backward() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        torch._dynamo.graph_break()
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def graph_break_before_the_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch._dynamo.graph_break()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def graph_break_in_the_model() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        hidden = model[0](x)
        torch._dynamo.graph_break()
        loss = F.mse_loss(model[2](hidden), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def backward_through_an_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = x * model[2].bias.sum()
        opt.zero_grad()
        first = F.mse_loss(model[0](x), torch.zeros(8))
        first.backward()
        opt.step()
        opt.zero_grad()
        loss = hidden.mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def scaler_of_the_user() -> Program:
    model, opt = _parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    program = Program(lambda: None, model, [opt])

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        program.log.append(scaler.state_dict())
        x, y = pair(call)
        return x, y * torch.inf if call == 2 else y

    program.step, program.batch = step, batch
    return program


@pattern()
def error_before_backward() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor, fails: bool) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        if fails:
            raise ValueError("no")
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), call == 2))


@pattern()
def error_between_backward_and_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor, fails: bool) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if fails:
            raise ValueError("no")
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: (*pair(call), call == 2))


@pattern()
def error_after_the_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor, fails: bool) -> Tensor:
        loss = _train(model, opt, x, y)
        if fails:
            raise ValueError("no")
        return loss

    return Program(step, model, [opt], lambda call: (*pair(call), call == 2))


@pattern()
def error_in_the_model() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(call: int) -> tuple[Tensor, Tensor]:
        return torch.arange(5) + (call == 2), pair(call)[1]

    return Program(step, model, [opt], batch)


@pattern()
def autocast_around_the_forward() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def gradients_cleared_before_they_are_used() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.zero_grad()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def parameters_written_between_backward_and_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            model[0].weight.mul_(0.9)
            model[2].bias.clamp_(-0.1, 0.1)
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)


@pattern()
def parameters_written_after_the_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = _train(model, opt, x, y)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)
        model[0].weight.data.div_(model[0].weight.data.norm())
        return loss

    return Program(step, model, [opt], pair)


@pattern()
def gradient_is_kept_from_the_step_before() -> Program:
    model, opt = _parts()
    kept: list[Tensor] = []
    program = Program(lambda: None, model, [opt], pair)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    def before(call: int) -> None:
        if kept:
            program.log.append([grad.clone() for grad in kept])
        kept[:] = [p.grad for p in model.parameters() if p.grad is not None]

    program.step, program.before = step, before
    return program


@pattern(whole=False)
def state_of_the_optimizer_read_after_the_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = _train(model, opt, x, y)
        sizes = [s["momentum_buffer"].norm() for s in opt.state.values() if "momentum_buffer" in s]
        return loss, torch.stack(sizes).sum()

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def count_in_the_state_read_after_the_update() -> Program:
    model = network()
    opt = Lamb(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss = _train(model, opt, x, y)
        return loss, opt.state[model[0].weight]["step"]

    return Program(step, model, [opt], pair)


@pattern()
def number_of_the_group_read_after_the_update() -> Program:
    model = network()
    opt = CountsInGroup(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss = _train(model, opt, x, y)
        return loss, opt.param_groups[0]["k"]

    return Program(step, model, [opt], pair)


@pattern(whole=False)
def attribute_of_the_optimizer_read_after_the_update() -> Program:
    model = network()
    opt = CountsItself(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        loss = _train(model, opt, x, y)
        return loss, opt.num_steps

    return Program(step, model, [opt], pair)


@pattern()
def rate_read_after_the_update() -> Program:
    model, opt = _parts()

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        loss = _train(model, opt, x, y)
        return {"loss": loss, "rate": opt.param_groups[0]["lr"]}

    def before(call: int) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (call + 1)

    return Program(step, model, [opt], pair, before)


@pattern()
def attribute_of_the_optimizer_written() -> Program:
    model, opt = _parts()
    program = Program(lambda: None, model, [opt], pair)
    opt.num_calls = 0  # type: ignore[attr-defined]

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.num_calls += 1  # type: ignore[attr-defined]
        loss = _train(model, opt, x, y)
        return loss

    def before(call: int) -> None:
        program.log.append(opt.num_calls)  # type: ignore[attr-defined]

    program.step, program.before = step, before
    return program
