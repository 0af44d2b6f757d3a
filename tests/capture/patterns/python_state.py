"""What steps keep in Python: on objects, classes and modules, in arrays and iterators."""

from __future__ import annotations

import collections
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.capture.patterns.registry import BEFORE_2_13, network, pair, pattern
from tests.programs import Program

Train = Callable[[Tensor, Tensor], Tensor]


def _program(
    step_of: Callable[[Train], Callable[..., Any]],
    note: Callable[[], Any] = lambda: None,
    model: Any = None,
) -> Program:
    """Return the program of the step that ``step_of`` makes of plain training.

    ``note`` says before each call what the step has left in Python.
    """
    model = model or network()
    opt: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    program = Program(step_of(train), model, [opt], pair)
    program.before = lambda call: program.log.append(note())
    return program


class Count:
    """Keeps its state on the class."""

    steps = 0
    losses: ClassVar[list[Tensor]] = []


@pattern(whole=not BEFORE_2_13)
def count_on_a_class() -> Program:
    Count.steps = 0

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            Count.steps += 1
            return train(x, y) * Count.steps

        return step

    return _program(step_of, lambda: Count.steps)


@pattern()
def list_on_a_class() -> Program:
    Count.losses.clear()

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> None:
            Count.losses.append(train(x, y))

        return step

    return _program(step_of, lambda: [loss.clone() for loss in Count.losses])


class Counting(nn.Module):
    """Counts its calls on the class, and computes with the count."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        out: Tensor = self.inner(x) * (1 + 0.1 * Counting.calls)
        return out


@pattern(whole=not BEFORE_2_13)
def count_on_the_class_of_the_model() -> Program:
    Counting.calls = 0
    torch.manual_seed(0)
    return _program(lambda train: lambda x, y: train(x, y), lambda: Counting.calls, Counting())


@dataclass(slots=True)
class Slots:
    steps: int = 0


@pattern()
def count_in_a_slot() -> Program:
    state = Slots()

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            state.steps += 1
            return train(x, y) * state.steps

        return step

    return _program(step_of, lambda: state.steps)


settings: Any = sys.modules.setdefault("settings_of_a_user", types.ModuleType("settings_of_a_user"))


@pattern()
def count_in_a_module() -> Program:
    settings.steps = 0

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Any:
            settings.steps += 1
            return train(x, y) * settings.steps

        return step

    return _program(step_of, lambda: settings.steps)


# Dynamo sets attributes of functions since 2.14; a TorchVersion compares as versions do.
@pattern(whole=torch.__version__ >= "2.14")
def count_on_a_function() -> Program:
    count: Any = lambda: None  # noqa: E731  # untyped, for the attribute
    count.steps = 0

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Any:
            count.steps += 1
            return train(x, y) * count.steps

        return step

    return _program(step_of, lambda: count.steps)


@pattern()
def count_in_an_array() -> Program:
    counts = np.zeros(2)

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            counts[0] += 1
            return train(x, y)

        return step

    return _program(step_of, counts.tolist)


@pattern()
def lists_by_name() -> Program:
    history: dict[str, list[Any]] = collections.defaultdict(list)

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = train(x, y)
            history["loss"].append(loss)
            history["size"].append(x.square().sum())
            return loss

        return step

    return _program(step_of, lambda: {k: [float(v) for v in vs] for k, vs in history.items()})


@pattern()
def number_logged_every_third_call() -> Program:
    calls, seen = [0], list[float]()

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = train(x, y)
            calls[0] += 1
            if calls[0] % 3 == 0:
                seen.append(loss.item())
            return loss

        return step

    return _program(step_of, lambda: list(seen))


@pattern()
def average_that_starts_as_none() -> Program:
    state: dict[str, Any] = {"average": None, "best": float("inf")}

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss, old = train(x, y), state["average"]
            state["average"] = loss if old is None else 0.9 * old + 0.1 * loss
            return loss

        return step

    return _program(step_of, lambda: dict(state))


@pattern()
def steps_from_a_generator() -> Program:
    def step_of(train: Train) -> Callable[..., Any]:
        def losses(x: Tensor, y: Tensor) -> Iterator[Tensor]:
            for _ in range(2):
                yield train(x, y)

        def step(x: Tensor, y: Tensor) -> list[Tensor]:
            return list(losses(x, y))

        return step

    return _program(step_of)


@pattern(whole=False)
def batches_from_an_iterator() -> Program:
    batches = itertools.cycle([pair(call) for call in range(3)])
    program = _program(lambda train: lambda: train(*next(batches)))
    program.batch = lambda call: ()
    return program


@pattern(whole=False)
def time_taken_inside() -> Program:
    times: list[float] = []

    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            start = time.perf_counter()
            loss = train(x, y)
            times.append(time.perf_counter() - start)
            return loss

        return step

    return _program(step_of, lambda: len(times))


@pattern()
def error_caught_inside() -> Program:
    def step_of(train: Train) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            try:
                if x.shape[0] == 4:
                    raise ValueError("a batch that is too small")
                return train(x, y)
            except ValueError:
                return torch.zeros(())

        return step

    program = _program(step_of)
    program.batch = lambda call: pair(call, 4 if call == 2 else 5)
    return program


class Lazy:
    """A property that computes its value once, on whatever object it is read of."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        value = self.wrapped(instance)
        setattr(instance, self.wrapped.__name__, value)
        return value


class Scores:
    """Made in the step; its properties need what ``__init__`` has set."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @Lazy
    def weights(self) -> Tensor:
        return self.logits.softmax(-1)

    @property
    def size(self) -> int:
        assert hasattr(self, "logits"), "read of an empty object"
        return self.logits.shape[-1]


class Heads(NamedTuple):
    first: Tensor
    second: Tensor


@pattern()
def objects_made_inside_with_properties() -> Program:
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        scores = Scores(out)
        heads = Heads(scores.weights, out * scores.size)
        drawn = torch.distributions.Categorical(logits=out)
        return F.mse_loss(heads.first * heads.second, y) + drawn.probs.square().mean()

    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Program(step, model, [opt], pair)
