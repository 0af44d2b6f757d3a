"""The report names line and reason also where Dynamo goes back to an earlier line to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompile.backend import last_report
from tests.capture.patterns.registry import network, pair
from tests.steps import compile_step


class Meter:
    """Something of the user's that Dynamo cannot trace."""

    @property
    def value(self) -> float:
        torch._dynamo.graph_break()  # meter
        return 2.0


def reading_state(opt: Any, meter: Meter) -> Any:
    return sum(state["momentum_buffer"].sum() for state in opt.state.values())  # state


def reading_meter(opt: Any, meter: Meter) -> Any:
    return meter.value


def line_of(mark: str) -> str:
    """Return the line of this file that ends with a comment ``# mark``."""
    lines = Path(__file__).read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"test_break_reasons.py:{at}"


@pytest.mark.parametrize(
    ("read", "reason", "mark"),
    [
        (reading_state, "what an update changes is read after it", "state"),
        (reading_meter, "graph_break", "meter"),
    ],
)
def test_break_has_the_line_that_caused_it_and_words(
    read: Callable[..., Any], reason: str, mark: str
) -> None:
    model, meter = network(), Meter()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        found = loss.detach() + read(opt, meter)
        opt.zero_grad()
        return found

    compiled = compile_step(step)
    for call in range(2):
        compiled(*pair(call))
    breaks = last_report(compiled).breaks
    assert not any("step_unsupported" in text for text, _ in breaks)
    assert any(reason in text and where == line_of(mark) for text, where in breaks), breaks


def test_step_that_is_given_up_has_reason_and_line_and_a_warning() -> None:
    """Not even the optimizer's fused update hides that nothing was compiled."""
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(False, check_nan=False):  # anomaly
            hidden = model[1](model[0](x))
            hidden.retain_grad()
            loss = F.mse_loss(model[2](hidden), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step)
    with pytest.warns(UserWarning, match=r"compiled nothing.* given up, runs eagerly: "):
        compiled(*pair(0))
    assert last_report(compiled).regions == []
    reasons = {reason: line for reason, line in last_report(compiled).breaks}
    (line,) = (reasons[reason] for reason in reasons if reason.startswith("given up"))
    assert line == line_of("anomaly")
