"""Steps that hand a closure to their optimizer; optimizers that call the step they inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program


def _with_closure(
    make: Callable[[Any], Any], call: Callable[[Any, Any], Any] = lambda opt, c: opt.step(c)
) -> Callable[[], Program]:
    """Return what builds a step that calls its optimizer with a closure."""

    def build() -> Program:
        model = network()
        opt = make(model.parameters())

        def step(x: Tensor, y: Tensor) -> Any:
            def closure() -> Tensor:
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                return loss

            return call(opt, closure)

        program = Program(step, model, [opt], pair)
        program.before = lambda call: program.log.append(getattr(opt, "num_steps", 0))
        return program

    return build


class HandsOn(torch.optim.AdamW):
    """Counts, warms up, and leaves the closure to the step that it inherits."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        self.param_groups[0]["lr"] = 0.01 * min(1.0, self.num_steps / 3)
        return super().step(closure)


class CallsItself(torch.optim.AdamW):
    """Calls the closure, then the inherited step twice."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.num_steps += 1
        super().step()
        super().step()
        return loss


class Repeats(torch.optim.SGD):
    """Calls the closure as often as it likes."""

    def step(self, closure: Any = None) -> Any:
        first = super().step(closure)
        return first + super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}
OF_USERS: dict[str, Callable[[Any], Any]] = {
    "an_optimizer_that_hands_it_on": lambda params: HandsOn(params, lr=0.01),
    "an_optimizer_that_calls_it_itself": lambda params: CallsItself(params, lr=0.01),
    "an_optimizer_that_repeats_it": lambda params: Repeats(params, lr=0.1),
}
for _name, _make in OPTIMIZERS.items():
    pattern(f"closure_of_{_name}")(_with_closure(_make))
for _name, _make in OF_USERS.items():
    pattern(f"closure_of_{_name}", whole=False)(_with_closure(_make))
pattern("closure_by_name")(
    _with_closure(OPTIMIZERS["adamw"], lambda opt, closure: opt.step(closure=closure))
)
pattern("closure_whose_loss_is_read")(
    _with_closure(OPTIMIZERS["adamw"], lambda opt, closure: opt.step(closure).item())
)
pattern("closure_that_is_none")(
    _with_closure(OPTIMIZERS["adamw"], lambda opt, closure: (closure(), opt.step(None)))
)


@pattern(whole=False)
def closure_of_lbfgs() -> Program:
    model = network()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure)

    return Program(step, model, [], pair)
