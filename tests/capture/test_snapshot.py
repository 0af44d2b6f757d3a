"""A step that ran on copies leaves no trace: tensors, optimizer, random and Python state."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile.capture.snapshot import restored
from tests.steps import compile_step

num_steps = 0
history: list[float] = []


class Trainer:
    """A step that touches everything it can reach."""

    def __init__(self, opt: str = "AdamW") -> None:
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        )
        self.opt = getattr(torch.optim, opt)(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda epoch: 1 / (1 + epoch))
        self.count = 0
        self.losses: list[float] = []
        self.seen = {"batches": 0}

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        global num_steps
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        self.opt.step()
        self.schedule.step()
        num_steps += 1
        self.count += 1
        self.seen["batches"] += 1
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "opt": self.opt.state_dict(),
                "schedule": self.schedule.last_epoch,
                "lr": self.opt.param_groups[0]["lr"],
                "grads": [p.grad for p in self.model.parameters()],
                "rng": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state(legacy=False)["state"]["key"],
                "count": self.count,
                "losses": self.losses,
                "seen": self.seen,
                "global": num_steps,
                "history": history,
            }
        )


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 24).reshape(6, 4), torch.arange(6) % 4


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def without_python(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "python"}


@pytest.mark.parametrize("num_before", [0, 2])
def test_trainer_is_as_before(num_before: int) -> None:
    trainer = Trainer()
    for _ in range(num_before):
        trainer.step(*batch())
    before = trainer.state()
    with restored(trainer.step, batch(), {}):
        trainer.step(*batch())
        random.random()
        np.random.rand()
        trainer.losses.append(1.0)
        assert trainer.count == num_before + 1
    after = trainer.state()
    assert after["python"] == before["python"]
    assert_same(without_python(after), without_python(before))
    assert len(trainer.opt.state) == (len(list(trainer.model.parameters())) if num_before else 0)


def test_next_step_is_what_it_would_have_been() -> None:
    torch.manual_seed(3)
    expected = Trainer()
    losses = [expected.step(*batch()) for _ in range(2)]
    torch.manual_seed(3)
    trainer = Trainer()
    with restored(trainer.step):
        trainer.step(*batch())
    assert_same([trainer.step(*batch()) for _ in range(2)], losses)


def test_arguments_written_in_place_are_restored() -> None:
    x = torch.ones(3)
    with restored((x,)):
        x.mul_(2)
    assert x.tolist() == [1, 1, 1]


def test_gradients_keep_their_tensor_and_its_values() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    grad = weight.grad
    with restored(lambda: weight):
        weight.square().sum().backward()
        weight.grad = torch.zeros(2)
    assert weight.grad is grad
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_closure_variables_are_restored() -> None:
    count, seen = 0, [1]

    def step() -> None:
        nonlocal count
        count += 1
        seen.append(count)

    with restored(step):
        step()
        assert (count, seen) == (1, [1, 1])
    assert (count, seen) == (0, [1])


def test_globals_are_restored() -> None:
    def step() -> None:
        global num_steps
        num_steps += 1
        history.append(0.5)

    before = num_steps
    with restored(step):
        step()
    assert num_steps == before
    assert history == []


def test_nested_functions_and_partials_are_followed() -> None:
    weight = torch.ones(2)

    def inner(scale: float) -> None:
        weight.mul_(scale)

    def outer(function: Callable[[], None]) -> None:
        function()

    step = functools.partial(outer, functools.partial(inner, 2.0))
    with restored(step):
        step()
    assert weight.tolist() == [1, 1]


def test_defaults_of_arguments_are_followed() -> None:
    weight = torch.ones(2)

    def step(w: Tensor = weight, *, seen: list[int] = []) -> None:  # noqa: B006
        w.add_(1)
        seen.append(1)

    with restored(step):
        step()
    assert weight.tolist() == [1, 1]
    assert step.__kwdefaults__ == {"seen": []}


def test_attributes_that_are_new_are_dropped() -> None:
    trainer = Trainer()
    with restored(trainer.step):
        trainer.model.extra = torch.ones(1)
        trainer.new = 1  # type: ignore[attr-defined]  # made by the step
    assert not hasattr(trainer, "new")
    assert not hasattr(trainer.model, "extra")


def test_everything_is_restored_after_an_error() -> None:
    weight = torch.ones(2)

    def step() -> None:
        weight.zero_()
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"), restored(step):
        step()
    assert weight.tolist() == [1, 1]


def test_views_into_one_storage_are_restored() -> None:
    flat = torch.zeros(4)
    parts = [flat[:2], flat[2:]]
    with restored(parts):
        parts[0].fill_(1)
        flat.add_(1)
    assert flat.tolist() == [0, 0, 0, 0]


def test_sets_and_tuples_are_followed() -> None:
    names, weight = {"a"}, torch.ones(1)
    with restored((names, (weight,))):
        names.add("b")
        weight.zero_()
    assert names == {"a"}
    assert weight.item() == 1


# --- explain -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt", ["SGD", "AdamW"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_explain_leaves_no_trace(opt: str, is_compiled: bool) -> None:
    trainer = Trainer(opt)
    step: Any = compile_step(trainer.step) if is_compiled else trainer.step
    step(*batch())
    before = trainer.state()
    report = mpcompile.explain(step, *batch(), options={"lowering": "eager"})
    after = trainer.state()
    assert report.regions
    assert after["python"] == before["python"]
    assert_same(without_python(after), without_python(before))


def test_explain_before_the_first_step_leaves_no_optimizer_state() -> None:
    trainer = Trainer()
    report = mpcompile.explain(trainer.step, *batch())
    assert report.regions[0].casts
    assert trainer.opt.state_dict()["state"] == {}
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.slow
def test_step_after_explain_trains_as_without_it() -> None:
    losses = []
    for explains in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        trainer = Trainer()
        compiled = compile_step(trainer.step)
        for _ in range(explains):
            mpcompile.explain(compiled, *batch())
        losses.append([compiled(*batch()) for _ in range(3)])
    assert_same(losses[1], losses[0])


def test_explain_takes_the_options_of_the_compiled_step() -> None:
    compiled = compile_step(Trainer().step, dtype="float32", table="autocast-cpu")
    report = mpcompile.explain(compiled, *batch())
    assert (report.config.dtype, report.config.table) == (torch.float32, "autocast-cpu")
    assert mpcompile.explain(compiled, *batch(), options={}).config.table == "painted"


def test_explain_adds_nothing_to_the_report_of_the_step() -> None:
    compiled = compile_step(Trainer().step)
    mpcompile.explain(compiled, *batch())
    assert mpcompile.last_report(compiled).regions == []


def test_explain_of_a_compiled_module_runs_its_forward() -> None:
    model = compile_step(nn.Linear(4, 4))
    report = mpcompile.explain(model, torch.ones(2, 4))
    assert [region.index for region in report.regions] == [0]
    assert report.regions[0].ops_after.half_share() == 1


def test_explain_restores_after_an_error_in_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))

    def step() -> None:
        with torch.no_grad():
            weight.mul_(2)
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        mpcompile.explain(step)
    assert weight.tolist() == [1, 1]


def test_deque_and_what_it_holds_are_restored() -> None:
    weight = torch.ones(2)
    recent = collections.deque([weight], maxlen=2)
    with restored(recent):
        weight.mul_(2)
        recent.extend([torch.zeros(1), torch.zeros(1)])
    (kept,) = recent
    assert kept is weight
    assert weight.tolist() == [1, 1]


class Counts:
    """Keeps its state on the class, as trainers with one instance do."""

    steps = 0
    losses: ClassVar[list[float]] = []
    table: ClassVar[dict[str, int]] = {}


class CountsMore(Counts):
    """Inherits a counter."""


@dataclasses.dataclass(slots=True)
class Slots:
    count: int = 0
    late: Any = dataclasses.field(init=False)


def test_data_of_classes_is_restored() -> None:
    def step() -> None:
        Counts.steps += 1
        Counts.losses.append(1.0)
        Counts.table["a"] = 1
        Counts.late = 1  # type: ignore[attr-defined]
        CountsMore.steps = 5

    with restored(step):
        step()
        assert (Counts.steps, Counts.losses, CountsMore.steps) == (1, [1.0], 5)
    assert (Counts.steps, Counts.losses, Counts.table) == (0, [], {})
    assert CountsMore.steps == 0
    assert not hasattr(Counts, "late")
    assert "steps" not in vars(CountsMore)


def test_class_of_an_object_is_restored() -> None:
    counts = CountsMore()

    def step() -> None:
        type(counts).steps += 1
        Counts.steps += 1

    with restored(step):
        step()
    assert (CountsMore.steps, Counts.steps) == (0, 0)


settings: Any = types.ModuleType("settings_of_the_user")
settings.count = 0


def counting_step() -> None:
    counting_step.calls += 1  # type: ignore[attr-defined]
    settings.count += 1


counting_step.calls = 0  # type: ignore[attr-defined]


def test_attributes_of_functions_and_variables_of_modules_are_restored() -> None:
    with restored(counting_step):
        counting_step()
        assert settings.count == 1
    assert (counting_step.calls, settings.count) == (0, 0)  # type: ignore[attr-defined]


def test_members_of_classes_in_c_are_left_alone() -> None:
    called: dict[str, Any] = {"function": np.isnan}
    with restored([called]):
        called["function"] = np.isinf
    assert called["function"] is np.isnan


def test_slots_are_restored() -> None:
    slots, full = Slots(), Slots()
    full.late = 1
    with restored([slots, full]):
        slots.count, slots.late = 1, 2
        del full.late
    assert (slots.count, full.late) == (0, 1)
    assert not hasattr(slots, "late")


def test_arrays_and_generators_are_restored() -> None:
    array, of_numpy = np.zeros(2), np.random.default_rng(0)
    of_torch, of_python = torch.Generator().manual_seed(0), random.Random(0)

    def draw() -> tuple[Any, ...]:
        array[0] += 1
        drawn = torch.rand(1, generator=of_torch).item()
        return of_numpy.random(), drawn, of_python.random(), array.tolist()

    with restored(draw):
        first = draw()
    assert draw() == first
