from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.capture.remedies import raising_branches
from tests.capture.remedies.whole_steps import (
    Program,
    check_breaks,
    check_whole,
    compile_whole,
    train_with,
)
from tests.steps import compile_step

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
WRONG = torch.tensor([0, 1, 2, 0, 1, 3])


class Classifier(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        if labels is not None and labels.max() >= self.num_classes:
            raise ValueError(
                f"labels must be below {self.num_classes}, but one is {labels.max().item()}"
            )
        return F.cross_entropy(self.linear(x), labels)


def checked_program() -> Program:
    model = Classifier()
    return train_with(model, model)


def wrapped(loss_of: Callable[..., Any]) -> Program:
    """Return a program whose loss is ``loss_of(linear, x, labels)``."""
    linear = nn.Linear(4, 8)
    return train_with(lambda x, labels: loss_of(linear, x, labels), linear)


def loss(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(linear(x), labels)


def test_branch_that_only_raises_is_in_the_graph() -> None:
    check_whole(checked_program, X, LABELS)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_check_raises_what_eager_raises_and_leaves_the_parameters_alone(lowering: str) -> None:
    model, step = checked_program()
    compiled = compile_step(step, dtype="float32", lowering=lowering)
    compiled(X, LABELS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"^labels must be below 3, but one is 3$") as found:
        compiled(X, WRONG)
    assert str(found.traceback[-1].path) == __file__
    assert all(map(torch.equal, model.parameters(), before))
    compiled(X, LABELS)
    assert last_report(compiled).breaks == []


def test_first_call_that_must_raise_raises() -> None:
    _, step = checked_program()
    with pytest.raises(ValueError, match="one is 3"):
        compile_whole(step)(X, WRONG)


def test_two_models_with_one_check_keep_their_own_bounds() -> None:
    small, large = Classifier(3), Classifier(5)
    steps = [compile_whole(train_with(model, model)[1]) for model in (small, large)]
    steps[1](X, WRONG)
    with pytest.raises(ValueError, match="below 3"):
        steps[0](X, WRONG)
    with pytest.raises(ValueError, match="below 5"):
        steps[1](X, WRONG + 2)


def test_loss_may_be_checked_between_forward_and_backward() -> None:
    model = nn.Linear(4, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = 100.0

    def step(x: Tensor, labels: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), labels)
        if not torch.isfinite(found) or found > limit:
            raise FloatingPointError(f"loss {found.item()} above {limit}")
        found.backward()
        opt.step()
        opt.zero_grad()
        return found.detach()

    compiled = compile_whole(step)
    compiled(X, LABELS)
    before = model.weight.detach().clone()
    with pytest.raises(FloatingPointError, match=r"loss nan above 100\.0"):
        compiled(X * float("nan"), LABELS)
    with pytest.raises(FloatingPointError, match=r"above 100\.0"):
        compiled(X * 1e4, LABELS)
    assert torch.equal(model.weight, before)
    assert last_report(compiled).breaks == []


def test_check_in_a_step_that_breaks_later_still_raises() -> None:
    def loss_of(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
        if labels.max() > 2:
            raise IndexError("a label is too large")
        hidden = linear(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(hidden, labels)

    _, step = wrapped(loss_of)
    compiled = compile_whole(step)
    compiled(X, LABELS)
    with pytest.raises(IndexError, match="a label is too large"):
        compiled(X, WRONG)


def caught(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
    try:
        if labels.max() > 2:
            raise ValueError("too large")
    except ValueError:
        labels = labels.clamp(max=2)
    return loss(linear, x, labels)


def with_more_than_raise(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
    if labels.max() > 2:
        message = "too large"
        raise ValueError(message)
    return loss(linear, x, labels)


def with_another_outcome(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
    if labels.max() > 2:
        labels = labels.clamp(max=2)
    return loss(linear, x, labels)


@pytest.mark.parametrize("loss_of", [caught, with_more_than_raise, with_another_outcome])
def test_branch_that_may_do_more_breaks_the_graph(loss_of: Callable[..., Any]) -> None:
    check_breaks(lambda: wrapped(loss_of), X, LABELS, reason="Data-dependent branching")


def test_error_that_the_step_handles_is_handled() -> None:
    _, step = wrapped(caught)
    compile_whole(step)(X, WRONG)


def test_finally_and_with_around_a_check_do_not_matter() -> None:
    def loss_of(linear: nn.Module, x: Tensor, labels: Tensor) -> Any:
        try:
            with contextlib.nullcontext():
                if labels.max() > 2:
                    raise ValueError("too large")
                return loss(linear, x, labels)
        finally:
            labels = labels + 1

    check_whole(lambda: wrapped(loss_of), X, LABELS)
    _, step = wrapped(loss_of)
    with pytest.raises(ValueError, match="too large"):
        compile_whole(step)(X, WRONG)


def test_check_breaks_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raising_branches, "is_traced_whole", lambda: False)
    check_breaks(checked_program, X, LABELS, reason="Data-dependent branching")
