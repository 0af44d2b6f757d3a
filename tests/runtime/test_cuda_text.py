"""CUDA text computes what eager computes, and compiles for GPUs without spilling registers."""

from __future__ import annotations

import math

import pytest
import torch

from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime import test_changes, test_grads, test_layouts
from tests.runtime.test_update import CASES, _make, _shapes
from tests.runtime.updating import parameters, relative_difference, set_grads, worst_excess

SLOW = ("adafactor", "muon")
WAITING = ("relative-step", "relative-step-warmup")
"""Keep a number on the host that they compute from tensors: there the host would have to wait."""
RUNS = [
    pytest.param(name, where, marks=pytest.mark.slow if where == "host" or name in SLOW else ())
    for name in CASES
    for where in ("device", "host")
    if where == "device" or name not in WAITING
]
WITH_REDUCTIONS = ("lamb", "lars")


@pytest.mark.parametrize(("name", "where"), RUNS)
def test_one_step_is_eagers_to_eight_eps(name: str, where: str, host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = where == "host" or name == "adafactor"
    worst, update, fused = worst_excess(_make(name), _shapes(name), steps=4)
    assert all(fused[1:]), update.reason
    assert worst <= 1.0
    assert host_machine.num_launches


@pytest.mark.filterwarnings("ignore:mpcompile. RelativeStep runs as eager")
@pytest.mark.parametrize("name", WAITING)
def test_what_the_host_would_wait_for_runs_as_eager(name: str, host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = True
    params = parameters(_shapes(name))
    update = OptimizerUpdate(_make(name)(params))
    for step in range(2):
        set_grads(step, params)
        update.run()
    assert "for which the host would have to wait" in update.reason
    assert host_machine.num_launches == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in WAITING])
def test_hundred_steps_stay_within_1e6(name: str, host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = True
    make, shapes = _make(name), _shapes(name)
    lists = [parameters(shapes), parameters(shapes)]
    eager, fused = (make(params) for params in lists)
    update = OptimizerUpdate(fused)
    for step in range(100):
        set_grads(step, *lists)
        eager.step()
        update.run()
    assert not update.reason
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "radam", "adam-ema", "lamb", "lars"])
def test_launches_do_not_grow_with_the_tensors(name: str, host_machine: HostMachine) -> None:
    sources = []
    for count in (2, 40):
        params = parameters(((3, 5),) * count)
        update = OptimizerUpdate(_make(name)(params))
        for step in range(3):
            set_grads(step, params)
            before = host_machine.num_launches
            assert update.run().fused == (step > 0), update.reason
        assert host_machine.num_launches - before == (2 if name in WITH_REDUCTIONS else 1)
        sources += [prepared.source for prepared in update.prepared.values()]
    assert len(set(sources)) == 1


# What is known of the C++ kernels holds for the CUDA text too.


@pytest.mark.slow
@pytest.mark.parametrize("grads", ["as the parameter", "contiguous"])
@pytest.mark.parametrize("name", test_layouts.LAYOUTS)
def test_layouts_and_views(name: str, grads: str, host_machine: HostMachine) -> None:
    test_layouts.test_layout_is_updated_as_eager_does(name, grads)
    assert host_machine.num_launches


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_other_dtypes(name: str, dtype: torch.dtype, host_machine: HostMachine) -> None:
    test_layouts.test_other_dtypes_round_where_eager_rounds(name, dtype)
    assert host_machine.num_launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_and_copies(dtype: torch.dtype, host_machine: HostMachine) -> None:
    test_layouts.test_16_bit_gradients_of_fp32_parameters(dtype)
    test_layouts.test_16_bit_copy_is_the_rounded_parameter(dtype)
    assert host_machine.num_launches


@pytest.mark.slow
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 3.0])
def test_clip_by_norm(order: float, write: bool, host_machine: HostMachine) -> None:
    for bound in (0.5, 1e6):
        test_grads.test_clip_by_norm(order, bound, write)
    assert host_machine.num_launches


@pytest.mark.slow
def test_other_treatments_of_gradients(host_machine: HostMachine) -> None:
    test_grads.test_clip_by_value_then_norm_of_unscaled_gradients()
    test_grads.test_unwritten_gradients_stay_as_they_were()
    for value in (1e30, 3e38):
        test_grads.test_norm_of_huge_gradients_does_not_overflow(value)
    for bad in (math.nan, math.inf):
        test_grads.test_non_finite_gradients_do_what_they_do_in_eager(bad)
    assert host_machine.num_launches


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("name", test_changes.CHANGES)
def test_changes_between_steps(name: str, where: str, host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = where == "host"
    test_changes.test_change_between_steps_is_met(name)
    assert host_machine.num_launches


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("schedule", ["lambda", "onecycle", "tensor"])
def test_schedules(schedule: str, where: str, host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = where == "host"
    test_changes.test_schedules_need_no_second_kernel(schedule)
    test_changes.test_tensors_in_a_tuple_are_read_at_every_step()
    test_changes.test_added_group_is_updated()
    assert host_machine.num_launches


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool, host_machine: HostMachine) -> None:
    test_grads.test_grad_scaler_drives_the_update(fused)
    assert host_machine.num_launches
