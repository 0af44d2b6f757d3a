from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.capture.remedies import output_capturing
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with

_lock = threading.Lock()


def maybe_install_capturing_hooks(model: nn.Module) -> None:
    """What transformers does in a model's first call, in short."""
    if getattr(model, "hooked", False):
        return
    with _lock:
        for module in model.children():
            module.register_forward_hook(scale)
        setattr(model, "hooked", True)  # noqa: B010  # as transformers does


def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        maybe_install_capturing_hooks(self)
        return self.linear(x)


def recorded_program() -> Program:
    model = Recorded()
    return train_with(lambda x: model(x).square().mean(), model)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that transformers is imported."""
    module = types.ModuleType(output_capturing._NAME)
    module.__dict__["maybe_install_capturing_hooks"] = maybe_install_capturing_hooks
    monkeypatch.setitem(sys.modules, output_capturing._NAME, module)


def test_hooks_are_registered_while_tracing_and_run_in_the_graph() -> None:
    check_whole(recorded_program, torch.randn(3, 4))


def test_lock_breaks_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_capturing, "is_traced_whole", lambda: False)
    check_breaks(recorded_program, torch.randn(3, 4), reason="Unsupported context manager")
