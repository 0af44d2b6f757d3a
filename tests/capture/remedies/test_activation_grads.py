from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import builtin

from mpcompile.capture.remedies import activation_grads
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with

pytestmark = pytest.mark.skipif(
    not hasattr(builtin, "SetAttrBuiltinVariable"),
    reason="older Dynamo does not trace requires_grad_() either",
)


def flagged_program() -> Program:
    """As transformers does for gradient checkpointing."""
    model = nn.Linear(4, 4)

    def loss_of(x: Tensor) -> Any:
        hidden = x[:, None]
        hidden.requires_grad = True
        return model(hidden).square().mean()

    return train_with(loss_of, model)


def adversarial_program() -> Program:
    model = nn.Linear(4, 4)

    def loss_of(x: Tensor) -> Any:
        delta = torch.zeros_like(x)
        delta.requires_grad = True
        model(x + delta).square().mean().backward()
        assert delta.grad is not None
        return model(x + 0.1 * delta.grad.sign()).square().mean()

    return train_with(loss_of, model)


def test_activation_that_requires_grad_is_in_the_graph() -> None:
    check_whole(flagged_program, torch.randn(3, 4))


def test_gradient_of_an_activation_is_what_eager_gives() -> None:
    check_whole(adversarial_program, torch.randn(3, 4))


def test_flag_of_an_activation_breaks_the_graph_without_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation_grads, "is_traced_whole", lambda: False)
    check_breaks(flagged_program, torch.randn(3, 4), reason="setattr() on Tensor.requires_grad")


def test_flag_of_an_input_is_left_to_regions() -> None:
    def build() -> Program:
        model = nn.Linear(4, 4)

        def loss_of(x: Tensor) -> Any:
            x.requires_grad = True
            return model(x).square().mean()

        return train_with(loss_of, model)

    check_breaks(build, torch.randn(3, 4), reason="setattr() on Tensor.requires_grad")
