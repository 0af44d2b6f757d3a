"""Putting an optimizer back: values, containers and numbers, in the objects that they are in."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile.runtime.put_back import remember


class Diary(torch.optim.Optimizer):
    """Keeps all kinds of state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).add_(1)
                state.setdefault("steps", []).append(self.num_steps)
                state.setdefault("last", deque(maxlen=2)).append(p.clone())
                state["count"] = state.get("count", 0) + 1
                p.sub_(group["lr"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_everything_is_put_back_in_place(count: int) -> None:
    param = nn.Parameter(torch.ones(2))
    opt = Diary([param])
    for _ in range(count):
        opt.step()
    value, group = param.detach().clone(), opt.param_groups[0]
    state = dict(opt.state.get(param, {}))
    mean = state["mean"].clone() if count else None
    put_back = remember(opt)
    opt.step()
    put_back()
    assert torch.equal(param, value)
    assert opt.param_groups[0] is group
    assert (opt.num_steps, group["k"], group["params"]) == (count, count, [param])
    found = opt.state.get(param, {})
    assert found.keys() == state.keys()
    assert all(found[key] is state[key] for key in ("mean", "steps", "last") if count)
    assert found.get("steps", []) == [n + 1 for n in range(count)]
    assert len(found.get("last", ())) == min(count, 2)
    assert found.get("count", 0) == count
    assert mean is None or torch.equal(found["mean"], mean)


def test_entry_that_has_changed_its_shape_is_replaced() -> None:
    param = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([param], lr=0.1)
    opt.state[param]["history"] = torch.ones(1)
    put_back = remember(opt)
    opt.state[param]["history"].resize_(3)
    put_back()
    assert opt.state[param]["history"].tolist() == [1.0]
