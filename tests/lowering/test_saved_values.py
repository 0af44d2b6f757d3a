"""What a forward saves for its backward is left as it is, where backward may run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.capture.patterns.registry import pair
from tests.programs import Program, compare


def _goes_back_twice() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], lambda call: pair(call, rows=4 + call % 3))


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backward_of_a_region_of_any_size_runs_again(lowering: str) -> None:
    options: dict[str, Any] = {"lowering": lowering, "capture": "regions"}
    found, compiled = compare(_goes_back_twice, tolerance=1e-5, **options)
    assert found == []
    assert len(last_report(compiled).regions) > 1
