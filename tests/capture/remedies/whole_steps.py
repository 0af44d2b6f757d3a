"""Steps that must become one graph each, and still do what eager does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpcompile.backend import last_report
from tests.steps import compile_step

Step = Callable[..., Tensor]
Program = tuple[nn.Module, Step]
Loss = Callable[..., Any]


def train_with(loss_of: Loss, model: nn.Module) -> Program:
    """Return ``model`` and a step that minimises ``loss_of``."""
    opt: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*batch: Any) -> Tensor:
        loss: Tensor = loss_of(*batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, step


def compile_whole(step: Step) -> Any:
    return compile_step(step, dtype="float32", disable=["fuse-updates"])


def breaks_of(compiled: Any) -> list[str]:
    """Return why the step is not one graph; empty if it is."""
    return [reason for reason, _ in last_report(compiled).breaks]


def check_whole(
    build: Callable[[], Program], *batch: Any, num_calls: int = 4, tolerance: float = 0.0
) -> Any:
    """Assert that the step is one graph and does what eager does; return it compiled."""
    model, step = _seeded(build)
    expected = [_seeded_call(step, batch, seed) for seed in range(num_calls)]
    copy, plain = _seeded(build)
    compiled = compile_whole(plain)
    found = [_seeded_call(compiled, batch, seed) for seed in range(num_calls)]
    assert breaks_of(compiled) == []
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        copy.state_dict(), model.state_dict(), rtol=tolerance, atol=tolerance
    )
    return compiled


def _seeded(build: Callable[[], Program]) -> Program:
    torch.manual_seed(0)
    return build()


def _seeded_call(step: Step, batch: Any, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return step(*batch)


def check_breaks(build: Callable[[], Program], *batch: Any, reason: str) -> None:
    """Assert that a step is left to regions for ``reason``, and does what eager does all the same.

    Tests use it with a remedy switched off, which shows that the remedy is needed.
    """
    model, step = _seeded(build)
    expected = _seeded_call(step, batch, 0)
    copy, plain = _seeded(build)
    compiled = compile_whole(plain)
    torch.testing.assert_close(_seeded_call(compiled, batch, 0), expected)
    torch.testing.assert_close(copy.state_dict(), model.state_dict())
    assert any(reason in found for found in breaks_of(compiled)), breaks_of(compiled)
