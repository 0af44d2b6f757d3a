from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile import last_report
from tests.steps import compile_step


class Warned(UserWarning):
    pass


class Model(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn(f"rows of {x.shape[1]}", Warned, stacklevel=1)
        out: Tensor = super().forward(x)
        return out


def step_of(model: nn.Module) -> Any:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        done: Tensor = loss.detach()
        return done

    return step


@pytest.mark.parametrize("capture", ["whole", "regions"])
def test_warning_is_shown_for_its_line_and_breaks_nothing(capture: str) -> None:
    compiled = compile_step(step_of(Model(4, 4)), capture=capture)
    with pytest.warns(Warned, match="rows of 4") as shown:
        compiled(torch.randn(3, 4))
    mine = [entry for entry in shown if entry.category is Warned]
    line = inspect.getsourcelines(Model.forward)[1] + 1
    assert {(entry.filename, entry.lineno) for entry in mine} == {(__file__, line)}
    reasons = [reason for reason, _ in last_report(compiled).breaks]
    assert not any("skipped" in reason or "warn" in reason for reason in reasons), reasons
    assert capture == "regions" or reasons == []


def test_warning_that_a_filter_makes_an_error_is_raised_before_the_update() -> None:
    model = Model(4, 4)
    compiled, before = compile_step(step_of(model)), model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Warned)
        with pytest.raises(Warned, match="rows of 4"):
            compiled(torch.randn(3, 4))
    assert torch.equal(model.weight, before)


def test_warning_of_a_program_of_another_backend_is_left_alone() -> None:
    compiled: Any = torch.compile(step_of(Model(4, 4)), backend="eager")
    for _ in range(3):
        with pytest.warns(Warned, match="rows of 4"):
            compiled(torch.randn(3, 4))
