"""Counts that the host keeps where the device decides on a skip: no wait, and true when read."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mpcompile.backend import last_report
from mpcompile.capture.snapshot import restored
from mpcompile.runtime import dispatch, machines
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.cubins import check_cubins
from tests.runtime.updating import parameters, relative_difference, set_grads
from tests.steps import Classifier, batch, compile_step


class Counted(torch.optim.Optimizer):
    """Counts in Python numbers, as people write it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["product"] = 0, 1.0
                    state["mean"] = torch.zeros_like(p)
                state["step"] += 1
                state["product"] *= 0.9
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mean"], alpha=-group["lr"] / (1 - state["product"]) / state["step"])


class CountsInGroup(torch.optim.Optimizer):
    """Counts once for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["k"])


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Counted": Counted,
    "CountsInGroup": CountsInGroup,
}


@pytest.fixture
def machine(host_machine: HostMachine) -> HostMachine:
    """Return a machine for which step counts are in host memory, as they are by default."""
    host_machine.scalars_on_host = True
    return host_machine


class Pair:
    """An optimizer fused on the device, and its twin in eager PyTorch."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] = MAKERS["AdamW"]) -> None:
        self.lists = [parameters(), parameters()]
        self.eager, self.fused = (make(params) for params in self.lists)
        self.update = OptimizerUpdate(self.fused)
        self.index = 0

    def run(self, pattern: str, clips: tuple[ClipNorm, ...] = ()) -> None:
        """Take steps; those marked x are skipped."""
        for letter in pattern:
            set_grads(self.index, *self.lists)
            self.index += 1
            self.update.run(plan=GradPlan(clips=clips, skip=torch.tensor([float(letter == "x")])))
            if letter != "x":
                for clip in clips:
                    torch.nn.utils.clip_grad_norm_(self.lists[0], clip.max_norm)
                self.eager.step()

    def assert_same(self) -> None:
        assert not self.update.reason
        assert relative_difference(*self.lists) <= 1e-6
        found, expected = self.fused.state_dict(), self.eager.state_dict()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        for mine, wanted in zip(found["state"].values(), expected["state"].values(), strict=True):
            for name in {"step", "mu_product", "product"} & mine.keys():
                assert type(mine[name]) is type(wanted[name])
                assert float(mine[name]) == pytest.approx(float(wanted[name]), rel=1e-6)

    def counts(self) -> set[float]:
        """Return what the host has, without asking for the truth."""
        return {float(state["step"]) for state in self.fused.state.values()}


@contextlib.contextmanager
def never_waiting(machine: HostMachine) -> Iterator[None]:
    """Fail if a tensor of the device is read, or the host is allowed to wait."""
    reads = {name: getattr(torch.Tensor, name) for name in ("item", "__bool__", "tolist")}

    def refusing(name: str) -> Any:
        def read(tensor: torch.Tensor) -> Any:
            assert machine.on_host(tensor), "the host waits for the device"
            return reads[name](tensor)

        return read

    before = machine.num_waits
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "__bool__"):
            patch.setattr(torch.Tensor, name, refusing(name))
        yield
    assert machine.num_waits == before


@pytest.mark.parametrize("lateness", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_steps_with_skips_are_eagers_without_them(
    name: str, lateness: int, machine: HostMachine
) -> None:
    machine.lateness = lateness
    pair = Pair(MAKERS[name])
    for pattern in ("..", "x", ".x.xx...", "xx", "......"):
        pair.run(pattern)
        pair.assert_same()
    pair.run(".x...x..x.x")
    pair.assert_same()


@pytest.mark.parametrize("clips", [(), (ClipNorm(0.1),)])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Counted"])
def test_host_never_waits_for_the_device(
    name: str, clips: tuple[ClipNorm, ...], machine: HostMachine
) -> None:
    machine.lateness = 1
    pair = Pair(MAKERS[name])
    pair.run("...", clips)
    with never_waiting(machine):
        pair.run("..x.x...", clips)
    before = machine.num_waits
    pair.assert_same()
    assert machine.num_waits == before + 1
    pair.fused.state_dict()
    assert machine.num_waits == before + 1  # nothing has happened since


@pytest.mark.parametrize("lateness", [0, 1, 3])
def test_host_learns_of_a_skip_in_later_steps(lateness: int, machine: HostMachine) -> None:
    machine.lateness = lateness
    pair = Pair()
    pair.run("...x")
    assert pair.counts() == {4.0}
    pair.run("." * (2 * lateness + 2))
    assert pair.counts() == {3.0 + 2 * lateness + 2}


def test_skip_is_read_where_the_host_counts_for_all_parameters(machine: HostMachine) -> None:
    pair = Pair(MAKERS["CountsInGroup"])
    pair.run("..")
    for is_set in (True, False):
        set_grads(2, pair.lists[1])
        assert pair.update.run(plan=GradPlan(skip=torch.tensor([float(is_set)]))).skipped == is_set
    assert pair.fused.param_groups[0]["k"] == 3


def test_step_without_skip_counts_on_the_host(machine: HostMachine) -> None:
    """bfloat16 needs no power on the device."""
    pair = Pair()
    for step in range(4):
        set_grads(step, *pair.lists)
        pair.eager.step()
        pair.update.run()
    (prepared,) = pair.update.prepared.values()
    assert prepared.late is None
    assert "pow" not in prepared.source
    pair.assert_same()


@pytest.mark.parametrize("lateness", [0, 2])
@pytest.mark.parametrize("pattern", [".", "x", ".x"])
def test_count_that_the_user_sets_is_taken(
    pattern: str, lateness: int, machine: HostMachine
) -> None:
    machine.lateness = lateness
    pair = Pair()
    pair.run(".." + pattern)
    for opt in (pair.eager, pair.fused):
        for state in opt.state.values():
            state["step"].fill_(100.0)
    pair.run(".x..")
    pair.assert_same()


@pytest.mark.parametrize("pattern", ["..", "..x"])
def test_loaded_state_is_taken(pattern: str, machine: HostMachine) -> None:
    machine.lateness = 2
    pair = Pair()
    pair.run("..")
    saved = copy.deepcopy(pair.fused.state_dict())
    pair.run(pattern)
    for opt in (pair.eager, pair.fused):
        opt.load_state_dict(copy.deepcopy(saved))
    pair.run(".x.x..")
    pair.assert_same()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copied_optimizer_has_true_counts(copied: Any, machine: HostMachine) -> None:
    dispatch.install()
    machine.lateness = 3
    pair = Pair()
    pair.run("..xx")
    twin = copied(pair.fused)
    assert {float(state["step"]) for state in twin.state.values()} == {2.0}


def test_count_that_is_read_by_itself_is_ahead_by_skips_under_way(machine: HostMachine) -> None:
    """As documented: nothing tells us of such a read, and the step must not wait."""
    machine.lateness = 3
    pair = Pair()
    pair.run("..xx")
    assert pair.counts() == {4.0}
    pair.fused.state_dict()
    assert pair.counts() == {2.0}


def test_eager_step_between_two_of_ours_finds_true_counts(machine: HostMachine) -> None:
    dispatch.install()
    machine.lateness = 2
    pair = Pair()
    pair.run("...x")
    set_grads(50, *pair.lists)
    pair.eager.step()
    pair.fused.step()
    pair.run("..x.")
    pair.assert_same()


def test_parameters_that_lack_a_gradient_now_and_then_keep_their_counts(
    machine: HostMachine,
) -> None:
    machine.lateness = 1
    pair = Pair()
    pair.run("..")
    for index, skips in enumerate([False, True, False, False, True, False]):
        set_grads(60 + index, *pair.lists)
        for params in pair.lists:
            params[index % 2].grad = None
        pair.update.run(plan=GradPlan(skip=torch.tensor([float(skips)])))
        if not skips:
            pair.eager.step()
    assert len(pair.update.prepared) == 3
    with never_waiting(machine):
        for index in range(4):
            set_grads(80 + index, *pair.lists)
            for params in pair.lists:
                params[index % 2].grad = None
            pair.update.run(plan=GradPlan(skip=torch.tensor([float(index == 1)])))
            if index != 1:
                pair.eager.step()
    pair.assert_same()


def test_steps_that_may_and_may_not_be_skipped_take_turns(machine: HostMachine) -> None:
    machine.lateness = 2
    pair = Pair()
    pair.run("..x")
    for step in range(3):
        set_grads(30 + step, *pair.lists)
        pair.eager.step()
        pair.update.run()
        pair.run("x.")
    pair.assert_same()


def test_another_compiled_step_of_the_optimizer_finds_true_counts(machine: HostMachine) -> None:
    machine.lateness = 2
    pair = Pair()
    pair.run("..")
    updates = [pair.update, OptimizerUpdate(pair.fused)]
    for index in range(6):
        pair.update = updates[index % 2]
        pair.run("x.")
    pair.assert_same()


def test_what_is_put_back_is_the_true_count(machine: HostMachine) -> None:
    machine.lateness = 3
    pair = Pair()
    pair.run("..x")
    with restored(pair.fused):
        pair.update.run(plan=GradPlan(skip=torch.zeros(1)))
    assert pair.counts() == {2.0}
    pair.run(".x.")
    pair.assert_same()


def test_counts_outlive_the_compiled_step(machine: HostMachine) -> None:
    machine.lateness = 3
    pair = Pair()
    pair.run("..xx")
    pair.update = OptimizerUpdate(torch.optim.SGD(parameters()))
    pair.assert_same()


def test_captured_launch_counts_on_the_device(
    machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpcompile.runtime import device_rows

    monkeypatch.setattr(device_rows, "_captured", [])
    pair = Pair()
    pair.run("...")
    machine.capturing = True
    pair.run("x.")  # the host runs what a card would only record
    machine.capturing = False
    pair.run("x.")
    pair.assert_same()


def test_compiled_float16_step_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default AdamW in a whole step: its counts are all that is on the host."""
    machine = HostMachine(lateness=1)
    monkeypatch.setitem(machines.MACHINES, "cpu", lambda device: machine)
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    counts = [state["step"] for state in opt.state.values()]
    monkeypatch.setattr(machine, "on_host", lambda tensor: any(tensor is c for c in counts))

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step, dtype="float16", check="off")
    x, labels = batch()
    compiled(x, labels)
    counts += [state["step"] for state in opt.state.values()]
    for _ in range(2):
        compiled(x, labels)
    with never_waiting(machine):
        for factor in (1.0, math.nan, 1.0, math.nan, 1.0, 1.0):
            compiled(x * factor, labels)
    found = {float(state["step"]) for state in opt.state_dict()["state"].values()}
    assert found == {3.0 + 4.0}
    report = last_report(compiled)
    assert len(report.whole) == 1
    assert not report.breaks
    assert [update.reason for update in report.updates] == [""]
    for source in machine.modules:
        check_cubins(source)
