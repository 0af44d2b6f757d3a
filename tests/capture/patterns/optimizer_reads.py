"""What steps read of their optimizer: numbers that its update changes, before it and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program
from tests.runtime.optimizers import CountsInGroup, CountsItself, Lamb, NamesItsPhase, WarmsUp


class Keeps(torch.optim.SGD):
    """Keeps state in an object, a list, a private name, a tensor of its group, and on the class."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inner, self.history, self._steps = Count(), list[int](), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self._steps += 1
        self.inner.steps += 1
        self.history.append(self._steps)
        self.param_groups[0]["size"] = torch.tensor(float(self._steps))
        type(self).calls += 1


class Count:
    steps = 0


Read = Callable[[Any], Any]
Use = Callable[[Tensor, Any], Any]


def _both(loss: Tensor, value: Any) -> Any:
    return loss, value


def _times(loss: Tensor, value: Any) -> Any:
    return loss * value


def _build(
    make: Callable[[Any], Any],
    read: Read,
    when: str,
    use: Use = _both,
    root: Callable[[Any], Any] = lambda opt: opt,
) -> Callable[[], Program]:
    """Return what builds a step that reads ``read(root(optimizer))``.

    Args:
        make: makes the optimizer.
        read: what is read.
        when: before or after the update, both, or after each of two.
        use: what the step returns of the loss and of what it has read.
        root: what the step has of its optimizer before it is called.
    """

    def build() -> Program:
        Keeps.calls = 0
        model = network()
        opt = make(model.parameters())
        held = root(opt)
        program = Program(lambda: None, model, [opt], pair)

        def step(x: Tensor, y: Tensor) -> Any:
            seen = [read(held)] if when in ("before", "both", "log") else []
            for _ in range(2 if when == "each" else 1):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                seen += [read(held)] if when in ("after", "both", "each") else []
            if when == "log":
                program.log.append(seen[0])
            return use(loss.detach(), seen[0] if len(seen) == 1 else seen)

        program.step = step
        return program

    return build


def _count(opt: Any) -> Any:
    return opt.param_groups[0]["k"]


def _rate(opt: Any) -> Any:
    return opt.param_groups[0]["lr"]


def _adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.1)


def _momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _counts(state: Any) -> Any:
    return [entry.get("step") for entry in state.values()]


def _keys(state: Any) -> Any:
    return [sorted(entry) for entry in state.values()]


WHOLE: dict[str, tuple[Any, ...]] = {
    "number_of_a_group_before": (CountsInGroup, _count, "before"),
    "number_of_a_group_before_computed_with": (CountsInGroup, _count, "before", _times),
    "number_of_a_group_before_in_a_list": (CountsInGroup, _count, "log"),
    "number_of_a_group_before_and_after": (CountsInGroup, _count, "both"),
    "number_of_a_group_held": (CountsInGroup, lambda g: g["k"], "both", _both,
                               lambda opt: opt.param_groups[0]),
    "numbers_of_a_group_before": (
        CountsInGroup, lambda opt: {**opt.param_groups[0], "params": 0}, "before"),
    "tuple_of_a_group_before": (WarmsUp, lambda opt: opt.param_groups[0]["range"], "before"),
    "part_of_a_tuple_before": (WarmsUp, lambda opt: opt.param_groups[0]["range"][1], "before"),
    "name_in_a_group_both": (NamesItsPhase, lambda o: o.param_groups[0]["phase"], "both"),
    "missing_key_of_a_group_before": (
        WarmsUp, lambda opt: opt.param_groups[0].get("steps"), "before"),
    "count_in_the_state_before": (Lamb, lambda opt: _counts(opt.state), "before"),
    "attribute_before": (CountsItself, lambda opt: opt.num_steps, "before"),
    "attribute_of_an_object_before": (Keeps, lambda opt: opt.inner.steps, "before"),
    "private_attribute_before": (Keeps, lambda opt: opt._steps, "before"),
    "attribute_of_the_class_before": (Keeps, lambda opt: opt.calls, "before"),
    "length_of_a_list_before": (Keeps, lambda opt: len(opt.history), "before"),
    "tensor_that_is_replaced_before": (
        Keeps, lambda opt: opt.param_groups[0].get("size"), "before"),
    "rate_of_a_user_after": (CountsInGroup, _rate, "after"),
    "rate_of_torch_after_each": (_adam, _rate, "each"),
    "rate_of_torch_computed_with": (_adam, _rate, "both", lambda loss, seen: loss * seen[1]),
}  # fmt: skip
IN_REGIONS: dict[str, tuple[Any, ...]] = {
    "number_of_a_group_after_computed_with": (CountsInGroup, _count, "after", _times),
    "number_of_a_group_after_each": (CountsInGroup, _count, "each"),
    "numbers_of_a_group_after": (
        WarmsUp, lambda opt: sorted(opt.param_groups[0].keys()), "after"),
    "part_of_a_tuple_after": (WarmsUp, lambda opt: opt.param_groups[0]["range"][1], "after"),
    "missing_key_of_a_group_after": (
        WarmsUp, lambda opt: opt.param_groups[0].get("steps"), "after"),
    "attribute_of_an_object_after": (Keeps, lambda opt: opt.inner.steps, "after"),
    "private_attribute_after": (Keeps, lambda opt: opt._steps, "after"),
    "attribute_of_the_class_after": (Keeps, lambda opt: opt.calls, "after"),
    "list_after": (Keeps, lambda opt: list(opt.history), "after"),
    "list_before_and_after": (Keeps, lambda opt: list(opt.history), "both"),
    "tensor_that_is_replaced_after": (
        Keeps, lambda opt: opt.param_groups[0].get("size"), "after"),
    "state_held_counts_after": (Lamb, _counts, "after", _both, lambda opt: opt.state),
    "state_held_length_after": (Lamb, len, "both", _both, lambda opt: opt.state),
    "state_held_keys_after": (_momentum, _keys, "both", _both, lambda opt: opt.state),
}  # fmt: skip
for _name, _arguments in WHOLE.items():
    pattern(f"optimizer_read_{_name}")(_build(*_arguments))
for _name, _arguments in IN_REGIONS.items():
    pattern(f"optimizer_read_{_name}", whole=False)(_build(*_arguments))
