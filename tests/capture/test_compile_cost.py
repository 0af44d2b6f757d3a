"""Compiling a whole step costs in proportion to its layers, and nothing for optimizer state.

Cost is counted in calls of Python functions: unlike seconds, they are the same on any machine.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.steps import TinyGPT, compile_step

TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))


def calls_of(function: Any, *args: Any) -> int:
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total


def gpt_step(layers: int) -> Any:
    torch.manual_seed(0)
    model = TinyGPT(width=16, layers=layers)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def test_cost_is_linear_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE_VERIFY_GRAPH", "0")
    compile_step(gpt_step(1), disable=["fuse-updates"])(TOKENS)  # what happens once a process
    counts = []
    for layers in (1, 2, 4):
        torch._dynamo.reset()
        compiled = compile_step(gpt_step(layers), disable=["fuse-updates"])
        counts.append(calls_of(compiled, TOKENS))
        assert last_report(compiled).whole
    one_more, two_more = counts[1] - counts[0], counts[2] - counts[1]
    assert 0 < two_more < 2.3 * one_more, counts


def sums_step(optimizer: Any) -> Any:
    """Return a step over 40 parameters that takes a few ops for all of them."""
    torch.manual_seed(0)
    params = nn.ParameterList(torch.randn(4) for _ in range(40))
    opt = optimizer(params.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        loss = (torch.stack(list(params)) * x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def test_state_costs_nothing() -> None:
    counts, inputs = [], []
    adam = functools.partial(torch.optim.AdamW, amsgrad=True, foreach=True)
    options: Any = {"check": "off", "disable": ["fuse-updates"]}
    compile_step(sums_step(torch.optim.SGD), **options)(torch.ones(4))
    for optimizer in (torch.optim.SGD, adam):
        torch._dynamo.reset()
        compiled = compile_step(sums_step(optimizer), **options)
        made = calls_of(compiled, torch.ones(4))
        steady = calls_of(compiled, torch.ones(4))
        counts.append(made - steady)
        text = last_report(compiled).regions[0].dynamo_before
        inputs.append(text.count("= placeholder"))
        assert last_report(compiled).whole
    assert inputs == [41, 41]
    assert counts[1] < 1.1 * counts[0], counts
