from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.capture import dynamo_handlers
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with

pytestmark = pytest.mark.filterwarnings("ignore:mpcompile. the first call compiled no backward")


def flagged_program() -> Program:
    model = nn.Linear(4, 4)

    def loss_of(x: Tensor) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return model(x).square().mean()

    return train_with(loss_of, model)


def test_flags_of_cudnn_stay_out_of_the_graph() -> None:
    check_whole(flagged_program, torch.randn(3, 4))


def test_flags_break_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_handlers, "is_traced_whole", lambda: False)
    check_breaks(flagged_program, torch.randn(3, 4), reason="they lie behind a break")


def test_flags_are_traced_as_they_are_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    check_breaks(flagged_program, torch.randn(3, 4), reason="they lie behind a break")
