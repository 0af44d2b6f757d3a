"""Tracing an optimizer's own step: inputs, branches, what is refused."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from mpcompile.errors import CodegenError
from mpcompile.runtime.analysis import Analysis, analyze
from mpcompile.runtime.structure import ParamStructure, describe_group, describe_state
from mpcompile.runtime.tracing import Representative, StateMissing, TracedGroup, trace_step
from tests.runtime import optimizers as by_hand
from tests.runtime.coupled import GlobalNorm
from tests.runtime.updating import parameters, set_grads


def _analyze(optimizer: torch.optim.Optimizer, steps: int = 2) -> Analysis:
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        set_grads(step, params)
        optimizer.step()
    group = optimizer.param_groups[0]
    structure = describe_group(group)
    reps = []
    for param in params:
        state = optimizer.state.get(param, {})
        described = describe_state(param, state)
        own = ParamStructure(structure, param.dtype, param.dim(), described)
        reps.append(Representative(param, dict(state), own))
    groups = [TracedGroup(group, structure)]
    return analyze(lambda forced: trace_step(optimizer, groups, reps, forced))


def _pair() -> list[torch.nn.Parameter]:
    return parameters(((3, 4), (5, 2)))


def test_sgd_is_one_expression() -> None:
    analysis = _analyze(torch.optim.SGD(_pair(), lr=0.1))
    assert str(analysis.results["param"]) == "fma(grad[i], f32(neg(group.lr)), param[i])"
    assert [(str(g.condition), g.value) for g in analysis.guards] == [
        ("ne(group.momentum, 0)", False),
        ("ne(group.weight_decay, 0)", False),
    ]


def test_every_number_of_adamw_is_an_input() -> None:
    text = str(_analyze(torch.optim.AdamW(_pair())).results["param"])
    for name in ("group.lr", "group.betas.0", "group.betas.1", "group.eps", "group.weight_decay"):
        assert name in text
    assert "state.step" in text


def test_branch_on_a_step_count_becomes_a_select() -> None:
    analysis = _analyze(torch.optim.RAdam(_pair()))
    assert str(analysis.results["param"]).startswith("where(gt(")
    assert not any("state" in str(guard.condition) for guard in analysis.guards)


def test_branch_on_data_becomes_a_select() -> None:
    analysis = _analyze(by_hand.Lars(_pair()))
    assert "where(gt(f64(f32(sqrt(sum_i(" in str(analysis.results["param"])


def test_python_int_state_is_input_and_output() -> None:
    analysis = _analyze(by_hand.Lamb(_pair()))
    assert str(analysis.results["state.step"]) == "add(state.step, 1)"


def test_minimum_and_root_of_a_number_stay_symbolic() -> None:
    analysis = _analyze(by_hand.AdamWithEma(_pair()))
    text = str(analysis.results["state.ema"])
    assert "min(" in text
    assert "sqrt(" in text


def test_matrix_products_stay_calls() -> None:
    analysis = _analyze(torch.optim.Muon(parameters(((3, 4), (3, 4)))))
    names = {str(call.target) for call in analysis.calls}
    assert {"aten.mm.default", "aten.addmm.default"} <= names
    assert analysis.reads_shape


def test_shape_reads_are_noticed() -> None:
    assert not _analyze(torch.optim.AdamW(_pair())).reads_shape
    assert not _analyze(by_hand.Lamb(_pair())).reads_shape


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (by_hand.BakedIn, r"Python computes with add\(state.step, 1\)"),
        (GlobalNorm, "couples parameters"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(make: Any, match: str) -> None:
    with pytest.raises(CodegenError, match=match):
        _analyze(make(_pair()))


def test_missing_state_is_left_to_the_optimizer() -> None:
    with pytest.raises(StateMissing):
        _analyze(torch.optim.AdamW(_pair()), steps=0)


def test_tracing_leaves_the_optimizer_alone() -> None:
    params = _pair()
    optimizer = by_hand.AdamWithEma(params)
    before_globals = dict(vars(by_hand))
    _analyze(optimizer)
    state = {p: {k: v for k, v in s.items()} for p, s in optimizer.state.items()}
    values = [p.detach().clone() for p in params]
    grads = [p.grad for p in params]
    _analyze(optimizer, steps=0)
    assert vars(by_hand) == before_globals
    assert vars(by_hand)["math"] is math
    assert all(torch.equal(a, b) for a, b in zip(values, params, strict=True))
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(s[k] is v for p, s in optimizer.state.items() for k, v in state[p].items())


def test_cost_of_tracing_does_not_grow_with_parameters() -> None:
    from mpcompile.runtime.update import OptimizerUpdate

    traces = []
    for count in (4, 40):
        params = parameters(((3, 4), (5,)) * count)
        update = OptimizerUpdate(torch.optim.AdamW(params))
        for step in range(2):
            set_grads(step, params)
            update.run()
        traces.append(update.classes.num_traces)
    assert traces[0] == traces[1]


def test_other_threads_may_call_what_is_compiled_meanwhile() -> None:
    """``torch.compile`` refuses calls while fx traces, in whichever thread that is."""
    seen: list[float] = []
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))

    class CallsAnotherThread(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            thread = threading.Thread(
                target=lambda: seen.append(float(compiled(torch.ones(2))[0])), daemon=True
            )
            thread.start()
            thread.join(60)
            super().step(closure)

    _analyze(CallsAnotherThread(_pair(), lr=0.1), steps=0)
    assert seen[0] == 2.0
