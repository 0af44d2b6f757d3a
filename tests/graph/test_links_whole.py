"""Backward nodes of a step that was captured whole are linked to their forward nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.steps import compile_step


class Sandwich(nn.Module):
    """Two linear layers, the first of which can be named in overrides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.gelu(self.first(x)))
        return found


def products(micro_batches: int, **options: Any) -> dict[tuple[str, str], set[str]]:
    """Return by module and op the precisions of the matrix products of a whole step."""
    torch.manual_seed(0)
    model = Sandwich()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for part in x.chunk(micro_batches):
            loss = model(part).square().mean() / micro_batches
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step, **options)
    compiled(torch.randn(8, 16))
    report = last_report(compiled)
    assert report.whole
    found: dict[tuple[str, str], set[str]] = {}
    for decision in report.regions[0].decisions:
        if decision.op in ("aten.addmm", "aten.mm"):
            found.setdefault((decision.module, decision.op), set()).add(decision.precision)
    return found


def test_overrides_of_a_module_reach_its_backward() -> None:
    for micro_batches in (1, 2):
        found = products(micro_batches, keep_fp32=["*first"])
        assert found["model.first", "aten.addmm"] == {"fp32"}
        assert found["model.first", "aten.mm"] == {"fp32"}
        assert found["model.second", "aten.addmm"] == {"half"}
        assert found["model.second", "aten.mm"] == {"half"}


def test_region_without_autocast_is_fp32_in_backward_too() -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    opt = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x @ weight
        loss = (y @ weight).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step)
    compiled(torch.randn(8, 16))
    precisions = [d.precision for d in last_report(compiled).regions[0].decisions if ".mm" in d.op]
    assert sorted(precisions) == ["fp32", "fp32", "half", "half", "half"]
