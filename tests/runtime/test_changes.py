"""What changes between two steps is met by the next one, without another kernel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime.coupled import ClippedLamb
from tests.runtime.updating import parameters, relative_difference, set_grads

Change = Callable[[torch.optim.Optimizer, list[torch.nn.Parameter]], None]


def _replace_data(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    params[0].data = torch.full_like(params[0], 0.25)


def _replace_state(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.full_like(params[1], 0.5)


def _state_data(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg"].data = torch.full_like(params[1], 0.5)


def _clear_state(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.state.clear()


def _load_state(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(2)
    optimizer.load_state_dict(state)


def _resize_state(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    state = optimizer.state[params[2]]["exp_avg"]
    state.resize_(1).resize_(params[2].shape).fill_(0.125)


def _hyperparameters(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[0].update(lr=0.03, betas=(0.8, 0.95), weight_decay=0.2, eps=1e-6)


def _strides(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    params[0].data = params[0].data.t().contiguous().t()


CHANGES: dict[str, Change] = {
    "p.data=": _replace_data,
    "state[p][key]=": _replace_state,
    "state.data=": _state_data,
    "state.clear()": _clear_state,
    "load_state_dict": _load_state,
    "resized state": _resize_state,
    "hyperparameters": _hyperparameters,
    "other strides": _strides,
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_between_steps_is_met(name: str) -> None:
    eager_params, fused_params = parameters(), parameters()
    eager, fused = torch.optim.AdamW(eager_params), torch.optim.AdamW(fused_params)
    update = OptimizerUpdate(fused)
    for step in range(8):
        if step in (3, 5):
            CHANGES[name](eager, eager_params)
            CHANGES[name](fused, fused_params)
        set_grads(step, eager_params, fused_params)
        eager.step()
        update.run()
    assert not update.reason
    assert relative_difference(eager_params, fused_params) <= 1e-6
    assert len({id(p.source) for p in update.prepared.values()}) == 1


def test_added_group_is_updated() -> None:
    eager_params, fused_params = parameters(), parameters()
    more = [parameters(((4, 4), (3,)), seed=1) for _ in range(2)]
    eager = torch.optim.AdamW(eager_params)
    fused = torch.optim.AdamW(fused_params)
    update = OptimizerUpdate(fused)
    for step in range(6):
        if step == 3:
            eager.add_param_group({"params": more[0], "lr": 0.1, "weight_decay": 0.0})
            fused.add_param_group({"params": more[1], "lr": 0.1, "weight_decay": 0.0})
        set_grads(step, eager_params, fused_params)
        set_grads(50 + step, more[0], more[1])
        eager.step()
        update.run()
    assert relative_difference(eager_params + more[0], fused_params + more[1]) <= 1e-6


@pytest.mark.parametrize("schedule", ["lambda", "onecycle", "tensor"])
def test_schedules_need_no_second_kernel(schedule: str) -> None:
    lists = [parameters(), parameters()]
    lr: Any = torch.tensor(1e-2) if schedule == "tensor" else 1e-2
    pair = [torch.optim.AdamW(params, lr=copy.deepcopy(lr)) for params in lists]
    update = OptimizerUpdate(pair[1])
    if schedule == "onecycle":
        schedulers: list[Any] = [
            torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20) for o in pair
        ]
    else:
        schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)) for o in pair]
    made = []
    for step in range(12):
        set_grads(step, *lists)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a scheduler wants to see optimizer.step() itself
            pair[0].step()
            update.run()
            for scheduler in schedulers:
                scheduler.step()
        for optimizer in pair:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (step + 1)
        made.append((update.num_prepared, update.classes.num_traces))
    assert made[1] == made[-1]
    assert relative_difference(*lists) <= 1e-6


def test_tensors_in_a_tuple_are_read_at_every_step() -> None:
    lists = [parameters(), parameters()]
    betas = [(torch.tensor(0.9), torch.tensor(0.99)) for _ in lists]
    pair = [
        torch.optim.AdamW(params, lr=torch.tensor(0.01), betas=b, foreach=False)
        for params, b in zip(lists, betas, strict=True)
    ]
    update = OptimizerUpdate(pair[1])
    for step in range(6):
        for beta1, _ in betas:
            beta1.fill_(0.9 - 0.1 * step)
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    assert relative_difference(*lists) <= 1e-6


def test_number_that_becomes_a_tensor_is_traced_again() -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(6):
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02) if step == 3 else 0.01
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    assert relative_difference(*lists) <= 1e-6


def test_flag_that_changes_the_step_is_traced_again() -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(9):
        for optimizer in pair:
            optimizer.param_groups[0]["nesterov"] = step % 3 == 1
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step % 2)
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    assert relative_difference(*lists) <= 1e-6


def test_parameters_without_gradient_are_left_out() -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(8):
        set_grads(step, *lists)
        for params in lists:
            params[step % 3].grad = None
        pair[0].step()
        update.run()
    assert relative_difference(*lists) <= 1e-6


def test_state_dicts_interchange_with_eager_at_any_step() -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, amsgrad=True) for params in lists]
    updates = [OptimizerUpdate(optimizer) for optimizer in pair]
    for step in range(6):
        set_grads(step, *lists)
        pair[step % 2].step()
        updates[1 - step % 2].run()
        state = copy.deepcopy(pair[0].state_dict())
        pair[0].load_state_dict(copy.deepcopy(pair[1].state_dict()))
        pair[1].load_state_dict(state)
    assert relative_difference(*lists) <= 1e-6


def test_freed_optimizer_frees_its_tensors() -> None:
    import gc
    import weakref

    params = parameters()
    optimizer = torch.optim.AdamW(params)
    update = OptimizerUpdate(optimizer)
    for step in range(3):
        set_grads(step, params)
        update.run()
    ref = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    del optimizer, update
    gc.collect()
    assert ref() is None


def test_number_that_the_optimizer_keeps_as_an_attribute_may_change() -> None:
    lists = [parameters(), parameters()]
    eager, fused = (ClippedLamb(params, max_norm=0.5) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(6):
        set_grads(step, *lists)
        for optimizer in (eager, fused):
            optimizer.defaults["max_norm"] = 0.5 if step < 3 else 5.0
        eager.step()
        assert update.run().fused == (step > 0)
    assert relative_difference(*lists) <= 1e-6
