"""Values that a traced backward has used up may leave the step; no module is needed for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.remedies.whole_steps import Program, check_whole, train_with


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_weight_that_spectral_norm_keeps_on_its_module_does_not_break_the_graph() -> None:
    def build() -> Program:
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 1))
        return train_with(lambda x: model(x).square().mean(), model)

    check_whole(build, torch.randn(3, 4))


def test_loss_may_be_returned_undetached() -> None:
    def build() -> Program:
        model = nn.Linear(4, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return model, step

    check_whole(build, torch.randn(3, 4))
