from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.capture.remedies import logger_calls
from tests.capture.remedies.whole_steps import (
    Program,
    breaks_of,
    check_whole,
    compile_whole,
    train_with,
)

logger = logging.getLogger(__name__)


@functools.lru_cache
def warning_once(self: logging.Logger, text: str) -> None:
    self.warning(text)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    mine = [record for record in caplog.records if record.name == __name__]
    return [record.getMessage() for record in mine]


def logging_program() -> Program:
    model = nn.Linear(4, 4)

    def loss_of(x: Tensor) -> Any:
        logger.warning("%d rows of %s", x.shape[0], f"width {x.shape[1]}")
        return model(x).square().mean()

    return train_with(loss_of, model)


def test_logger_call_runs_in_each_call_as_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    check_whole(logging_program, torch.randn(3, 4), num_calls=3)
    assert messages(caplog) == ["3 rows of width 4"] * 6  # three calls of eager, three compiled


def test_logger_call_breaks_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_calls, "is_traced_whole", lambda: False)
    _, step = logging_program()
    compiled = compile_whole(step)
    compiled(torch.randn(3, 4))
    assert any("logging.Logger method not supported" in reason for reason in breaks_of(compiled))


def test_method_added_to_loggers_is_deferred_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    warning_once.cache_clear()

    def build() -> Program:
        model = nn.Linear(4, 4)

        def loss_of(x: Tensor) -> Any:
            logger.warning_once("deprecated")  # type: ignore[attr-defined]
            return model(x).square().mean()

        return train_with(loss_of, model)

    check_whole(build, torch.randn(3, 4))
    assert messages(caplog) == ["deprecated"]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # inside of logging
def test_logged_tensor_breaks_the_graph_and_is_logged_before_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 1, bias=False)

    def loss_of(x: Tensor) -> Any:
        logger.warning("weight %s", model.weight.detach())
        return model(x).square().mean()

    _, step = train_with(loss_of, model)
    before = model.weight.detach().clone()
    compiled = compile_whole(step)
    compiled(torch.randn(3, 2))
    assert f"weight {before}" in caplog.text
    assert any("logging.Logger" in reason for reason in breaks_of(compiled))


def test_question_to_a_logger_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)

    def loss_of(x: Tensor) -> Any:
        scale = 1.0 if logger.isEnabledFor(logging.ERROR) else 0.0
        return model(x).square().mean() * scale

    _, step = train_with(loss_of, model)
    assert compile_whole(step)(torch.randn(3, 2)) > 0
