"""The table in device memory: what is uploaded when, what a device reads by itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpcompile.runtime import device_rows
from mpcompile.runtime import update as update_module
from mpcompile.runtime.device_rows import DeviceRows, device_chunks
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.guarding import guarded_plan
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.coupled import GlobalNorm
from tests.runtime.updating import parameters, relative_difference, set_grads, with_factors


def _ready(count: int = 2, **options: Any) -> tuple[list[torch.nn.Parameter], OptimizerUpdate]:
    """Return parameters and an update of AdamW that has run ``count`` steps."""
    params = parameters()
    update = OptimizerUpdate(torch.optim.AdamW(params, **options))
    for step in range(count):
        set_grads(step, params)
        update.run()
    assert not update.reason
    return params, update


def _rows(update: OptimizerUpdate) -> DeviceRows:
    (prepared,) = update.prepared.values()
    assert isinstance(prepared.rows, DeviceRows)
    return prepared.rows


def test_every_tensor_has_a_chunk_and_large_ones_have_large_chunks() -> None:
    chunks = device_chunks([0, 5, 10_000])
    assert list(chunks.first) == [0, 1, 2, 5]
    assert list(chunks.row) == [0, 1, 2, 2, 2]
    assert list(zip(chunks.begin, chunks.end, strict=True)) == [
        (0, 0),
        (0, 5),
        (0, 4096),
        (4096, 8192),
        (8192, 10_000),
    ]
    assert len(device_chunks([10**9]).row) <= device_rows.BLOCKS_WANTED
    assert max(device_chunks([3 * 10**9]).end) == 3 * 10**9


def test_nothing_is_uploaded_while_nothing_changes(host_machine: HostMachine) -> None:
    params, update = _ready()
    optimizer = update.optimizer
    before = host_machine.num_uploads
    for _ in range(3):
        update.run()
    assert host_machine.num_uploads == before
    optimizer.param_groups[0]["lr"] = 0.5
    update.run()
    assert host_machine.num_uploads == before + 1
    set_grads(7, params)  # elsewhere in memory
    update.run()
    assert host_machine.num_uploads == before + 2


def test_step_counts_on_the_host_stay_there(host_machine: HostMachine) -> None:
    host_machine.scalars_on_host = True
    params, update = _ready()
    kernel = _rows(update).kernel
    assert "pow" not in _rows(update).source
    assert any(name.startswith("number.host.") for name in kernel.numbers)
    assert all(update.optimizer.state[p]["step"] == 2 for p in params)


@pytest.mark.parametrize("change", ["in place", "another tensor"])
def test_tensor_rate_of_the_device_is_read_by_the_kernel(
    change: str, host_machine: HostMachine
) -> None:
    rate = torch.tensor(0.01)
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(lists[0], lr=0.01), torch.optim.AdamW(lists[1], lr=rate)]
    update = OptimizerUpdate(pair[1])
    for step in range(5):
        if step == 3:
            pair[0].param_groups[0]["lr"] = 0.05
            pair[1].param_groups[0]["lr"] = (
                rate.fill_(0.05) if change == "in place" else torch.tensor(0.05)
            )
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    assert "at.group.lr" in _rows(update).kernel.columns
    assert relative_difference(*lists) <= 1e-6


def _refuse(tensor: torch.Tensor) -> float:
    raise AssertionError("the host waits for the device")


@contextlib.contextmanager
def _host_may_not_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "__int__", "tolist"):
            patch.setattr(torch.Tensor, name, _refuse)
        yield


def test_steady_steps_read_nothing_from_the_device(host_machine: HostMachine) -> None:
    _, update = _ready(lr=torch.tensor(0.01))
    plan = GradPlan(factor=torch.tensor(0.5), clips=(ClipNorm(0.1),), skip=torch.zeros(()))
    update.run(plan=plan)  # makes the table
    with _host_may_not_wait():
        outcome = update.run(plan=plan)
    assert outcome.fused
    assert outcome.norm is not None


@pytest.mark.parametrize("clips", [(), (ClipNorm(0.1),)])
def test_loss_scale_of_float16_is_read_by_the_kernel_alone(
    clips: tuple[ClipNorm, ...], host_machine: HostMachine
) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update, scale = OptimizerUpdate(pair[1]), LossScale(ScalePolicy(initial=1024.0))
    scale.tells_of_trouble = False
    for step in range(6):
        set_grads(step, *lists)
        inverse = float(scale.inverse(torch.device("cpu")))
        grads = [param.grad / inverse for param in lists[1] if param.grad is not None]
        if step == 3:
            grads[1][0] = float("inf")
        else:
            for clip in clips:
                torch.nn.utils.clip_grad_norm_(lists[0], clip.max_norm)
            pair[0].step()
        with contextlib.nullcontext() if step < 2 else _host_may_not_wait():
            scale.begin_call()
            plan = guarded_plan(GradPlan(clips=clips), scale, pair[1], grads, is_scaled=True)
            update.run(grads, plan)
            scale.end_call(failed=False)
        assert relative_difference(*lists) <= 1e-6
    assert not update.reason
    assert float(scale.inverse(torch.device("cpu"))) == 1 / 512
    assert {float(state["step"]) for state in pair[1].state.values()} == {5.0}


@pytest.mark.parametrize("skip", [None, torch.zeros(())])
@pytest.mark.parametrize("clips", [(), (ClipNorm(0.1),)])
def test_factor_of_each_gradient_is_read_by_update_and_norm(
    clips: tuple[ClipNorm, ...], skip: torch.Tensor | None, host_machine: HostMachine
) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(4):
        factors = [2.0 ** (row - step) for row in range(len(lists[0]))]
        grads = with_factors(lists[0], step, factors)
        for clip in clips:
            torch.nn.utils.clip_grad_norm_(lists[0], clip.max_norm)
        pair[0].step()
        with contextlib.nullcontext() if step < 2 else _host_may_not_wait():
            update.run(grads, GradPlan(clips=clips, skip=skip, own_factors=tuple(factors)))
    assert not update.reason
    assert relative_difference(*lists) <= 1e-6


def test_skip_is_decided_on_the_device(host_machine: HostMachine) -> None:
    params, update = _ready()
    skip = torch.zeros(())
    for is_set in (True, False):
        skip.fill_(is_set)
        before = [p.detach().clone() for p in params]
        outcome = update.run(plan=GradPlan(skip=skip))
        assert outcome.fused
        assert [torch.equal(a, b) for a, b in zip(before, params, strict=True)] == [is_set] * 5
        steps = {float(update.optimizer.state[p]["step"]) for p in params}
        assert steps == {2.0 if is_set else 3.0}


def test_norm_and_coefficient_stay_on_the_device(host_machine: HostMachine) -> None:
    params, update = _ready()
    update.run(plan=GradPlan(clips=(ClipNorm(0.5),)))
    before = host_machine.num_launches
    outcome = update.run(plan=GradPlan(clips=(ClipNorm(0.5),)))
    assert host_machine.num_launches - before == 2
    assert "gradient norm" in [record.name for record in update.record().kernels]
    grads = [p.grad for p in params if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(grads)
    assert outcome.norm is not None
    torch.testing.assert_close(outcome.norm, expected, rtol=1e-5, atol=0.0)


def test_plain_factor_after_a_clip_is_not_the_coefficient(host_machine: HostMachine) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.SGD(params, lr=0.1) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(6):
        set_grads(step, *lists)
        plan = GradPlan(clips=(ClipNorm(0.1),)) if step % 2 else GradPlan()
        if plan.clips:
            torch.nn.utils.clip_grad_norm_(lists[0], 0.1)
        pair[0].step()
        update.run(plan=plan)
    assert len(update.prepared) == 1
    assert relative_difference(*lists) <= 1e-6


def test_captured_launch_has_a_table_of_its_own(
    host_machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_captured", [])
    params, update = _ready()
    host_machine.capturing = True
    set_grads(3, params)
    update.run()
    host_machine.capturing = False
    ((rows, captured, staged),) = device_rows._captured
    assert captured.data_ptr() != rows._moving.data_ptr()
    held = staged.clone()
    set_grads(4, params)
    update.run()
    assert torch.equal(staged, held)
    assert torch.equal(captured, held)


def test_first_step_under_capture_runs_as_eager(host_machine: HostMachine) -> None:
    host_machine.capturing = True
    _, update = _ready()
    assert not update.prepared
    host_machine.capturing = False
    set_grads(2, update.optimizer.param_groups[0]["params"])
    assert update.run().fused


class Branching(torch.optim.Optimizer):
    """Looks at its rate in Python."""

    def __init__(self, params: Any, lr: torch.Tensor) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["lr"] > 0.5:
                    p.mul_(0.5)
                p.add_(p.grad, alpha=-0.1)


class CountsOnHost(torch.optim.Optimizer):
    """Keeps in a Python number what it computes from its gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["largest"] = max(state.get("largest", 0.0), p.grad.abs().sum().item())
                p.add_(p.grad, alpha=-group["lr"] / (1.0 + state["largest"]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda ps: Branching(ps, torch.tensor(0.1)), "branches on 'lr', a tensor of the device"),
        (GlobalNorm, "a step that couples its parameters has no CUDA kernel"),
        (CountsOnHost, "'state.largest' is kept on the host and computed from values of the"),
    ],
)
def test_what_has_no_kernel_on_a_device_runs_as_eager_with_the_reason(
    make: Any, reason: str, host_machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_module, "_warned", set())
    lists = [parameters(), parameters()]
    pair = [make(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            set_grads(step, *lists)
            pair[0].step()
            update.run()
    assert [reason in str(w.message) for w in caught] == [True]
    assert relative_difference(*lists) == 0.0


def test_blocks_may_run_in_any_order(host_machine: HostMachine) -> None:
    results = []
    for reverse in (False, True):
        host_machine.reverse = reverse
        host_machine.modules.clear()
        params = parameters(((130, 150), (7,)))
        update = OptimizerUpdate(torch.optim.AdamW(params))
        for step in range(4):
            set_grads(step, params)
            update.run(plan=GradPlan(clips=(ClipNorm(0.5),)))
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
