"""Every optimizer that is fused computes what eager computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpcompile.runtime import update as update_module
from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime import optimizers as by_hand
from tests.runtime.coupled import Neighbours, RememberedNorm
from tests.runtime.updating import parameters, relative_difference, set_grads, worst_excess

O = torch.optim  # noqa: E741 - a table of optimizers reads better so
MATRICES = ((3, 4), (7, 30), (150, 130), (48, 2), (5, 5))

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.1}),
    "sgd-momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd-nesterov": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ),
    "adam": (O.Adam, {"weight_decay": 0.1}),
    "adamw": (O.AdamW, {}),
    "adamw-amsgrad": (O.AdamW, {"amsgrad": True, "maximize": True}),
    "adamw-foreach": (O.AdamW, {"foreach": True}),
    "adamw-fused": (O.AdamW, {"fused": True}),
    "adamw-tensor-lr": (O.AdamW, {"lr": torch.tensor(1e-3)}),
    "nadam": (O.NAdam, {}),
    "radam": (O.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop": (O.RMSprop, {}),
    "rmsprop-momentum": (O.RMSprop, {"momentum": 0.9}),
    "rmsprop-centered": (O.RMSprop, {"centered": True}),
    "adagrad": (O.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (O.Adadelta, {}),
    "adamax": (O.Adamax, {}),
    "asgd": (O.ASGD, {"t0": 2}),
    "rprop": (O.Rprop, {}),
    "adafactor": (O.Adafactor, {}),
    "muon": (O.Muon, {}),
    "lion": (by_hand.Lion, {}),
    "lamb": (by_hand.Lamb, {}),
    "lars": (by_hand.Lars, {}),
    "adam-ema": (by_hand.AdamWithEma, {}),
    "counts-in-group": (by_hand.CountsInGroup, {}),
    "warms-up": (by_hand.WarmsUp, {}),
    "branches-on-tensors": (by_hand.BranchesOnTensors, {}),
    "centers-rows": (by_hand.CentersRows, {}),
    "relative-step": (by_hand.RelativeStep, {}),
    "relative-step-warmup": (by_hand.RelativeStep, {"warmup": True}),
}


def _make(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    cls, options = CASES[name]
    return lambda params: cls(params, **copy.deepcopy(options))


def _shapes(name: str) -> tuple[tuple[int, ...], ...]:
    return MATRICES if name == "muon" else ((3, 4), (7,), (130, 150), (5, 1, 3), (1,))


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_eagers_to_eight_eps(name: str) -> None:
    worst, update, fused = worst_excess(_make(name), _shapes(name))
    assert all(fused[1:]), update.reason
    assert worst <= 1.0


@pytest.mark.parametrize("name", CASES)
def test_hundred_steps_stay_within_1e6(name: str) -> None:
    make, shapes = _make(name), _shapes(name)
    eager_params, fused_params = parameters(shapes), parameters(shapes)
    eager, fused = make(eager_params), make(fused_params)
    update = OptimizerUpdate(fused)
    for step in range(100):
        set_grads(step, eager_params, fused_params)
        eager.step()
        update.run()
    assert relative_difference(eager_params, fused_params) <= 1e-6


def test_capturable_adamw_runs_on_cpu() -> None:
    eager_params, fused_params = parameters(), parameters()
    eager = O.AdamW(eager_params)
    fused = O.AdamW(fused_params, capturable=True)
    update = OptimizerUpdate(fused)
    fused.param_groups[0]["capturable"] = (
        False  # eager refuses it on a CPU, also for the first step
    )
    set_grads(0, eager_params, fused_params)
    eager.step()
    update.run()
    fused.param_groups[0]["capturable"] = True
    for step in range(1, 10):
        set_grads(step, eager_params, fused_params)
        eager.step()
        assert update.run().fused, update.reason
    assert relative_difference(eager_params, fused_params) <= 1e-6


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Neighbours, "reads elements of two"),
        (by_hand.BakedIn, "would be baked in"),
        (by_hand.CountsParameters, "depends on how many parameters"),
        (by_hand.NamesItsPhase, "changes 'phase' of its group"),
        (by_hand.ChangesTensorOfGroup, "changes 'rate' of its group"),
        (by_hand.CountsInState, "keeps state of no parameter ('k')"),
        (by_hand.CountsInDict, "changes its attribute 'counts'"),
        (by_hand.CountsItself, "changes its attribute 'num_steps'"),
    ],
)
def test_what_has_no_kernel_runs_as_eager_with_the_reason(
    cls: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager_params, fused_params = parameters(), parameters()
    eager, fused = cls(eager_params), cls(fused_params)
    update = OptimizerUpdate(fused)
    monkeypatch.setattr(update_module, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            set_grads(step, eager_params, fused_params)
            eager.step()
            update.run()
    assert [reason in str(w.message) for w in caught] == [True]
    assert reason in update.reason
    assert all(torch.equal(a, b) for a, b in zip(eager_params, fused_params, strict=True))


def test_python_int_state_is_written_back() -> None:
    params = parameters()
    optimizer = by_hand.Lamb(params)
    update = OptimizerUpdate(optimizer)
    for step in range(4):
        set_grads(step, params)
        update.run()
    steps = [optimizer.state[p]["step"] for p in params]
    assert steps == [4] * len(params)
    assert all(isinstance(step, int) for step in steps)


def test_numbers_in_groups_are_written_back() -> None:
    lists = [parameters(), parameters()]
    eager, fused = (
        by_hand.WarmsUp([{"params": params[:2]}, {"params": params[2:], "lr": 0.3}])
        for params in lists
    )
    update = OptimizerUpdate(fused)
    for step in range(8):
        set_grads(step, *lists)
        eager.step()
        assert update.run().fused == (step > 0)
        for mine, theirs in zip(fused.param_groups, eager.param_groups, strict=True):
            assert (mine["steps"], mine["range"]) == (theirs["steps"], theirs["range"])
            assert isinstance(mine["steps"], int)
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.filterwarnings("ignore:mpcompile. WarmsUp runs as eager")
def test_numbers_in_a_group_without_gradients_are_those_of_eager() -> None:
    """A step counts up there too, so it is left to eager."""
    lists = [parameters(), parameters()]
    eager, fused = (by_hand.WarmsUp(params) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(6):
        if step == 3:
            for optimizer in (eager, fused):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        set_grads(step, *lists)
        eager.step()
        update.run()
        for mine, theirs in zip(fused.param_groups, eager.param_groups, strict=True):
            assert (mine["steps"], mine["range"]) == (theirs["steps"], theirs["range"])
    assert "no parameter of group 1 has a gradient" in update.reason
    assert relative_difference(*lists) <= 1e-6


def test_number_of_a_group_from_a_total_is_written_back() -> None:
    lists = [parameters(), parameters()]
    eager, fused = (RememberedNorm(params) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(5):
        set_grads(step, *lists)
        eager.step()
        assert update.run().fused
        found, want = (o.param_groups[0]["average"] for o in (fused, eager))
        assert found == pytest.approx(want, rel=1e-6)
    assert relative_difference(*lists) <= 1e-6


class KeepsFactor(torch.optim.Optimizer):
    """Reads a Python number of its state that it never changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factor"] = 3.0
                p.add_(p.grad, alpha=-group["lr"] * state["factor"])


def test_python_number_that_is_only_read_stays() -> None:
    lists = [parameters(), parameters()]
    pair = [KeepsFactor(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(4):
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    assert all(pair[1].state[p] == {"factor": 3.0} for p in lists[1])
    assert relative_difference(*lists) <= 1e-6
