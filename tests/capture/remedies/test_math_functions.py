from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.capture.remedies import math_functions
from mpcompile.graph.roles import GraphKind
from tests.capture.remedies.whole_steps import Program, check_whole, train_with
from tests.steps import compile_step

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
CALLS = 4
OF_A_COUNT: dict[str, Callable[[int], float]] = {
    "warm-up of an average": lambda count: 0.99 * (1 - math.exp(-count / 20)),
    "weight of an adversary": lambda count: 2 / (1 + math.exp(-10 * (count / 100))) - 1,
    "exp2": lambda count: math.exp2(-count),
    "log": lambda count: math.log(count + 1),
    "log to a base": lambda count: math.log(count + 1, 3.0),
    "log10": lambda count: math.log10(count),
    "pow": lambda count: math.pow(0.9, count),
    "hypot": lambda count: math.hypot(count, 0.5),
}


def counting_program(weigh: Callable[[int], float]) -> Program:
    model, seen = nn.Linear(4, 5), [0]

    def loss_of(x: Tensor) -> Tensor:
        seen[0] += 1
        loss: Tensor = model(x).square().mean()
        return loss * (1 + weigh(seen[0]))

    return train_with(loss_of, model)


@pytest.mark.parametrize("name", OF_A_COUNT)
def test_two_graphs_serve_all_counts(name: str) -> None:
    def build() -> Program:
        return counting_program(OF_A_COUNT[name])

    compiled = check_whole(build, X, num_calls=CALLS, tolerance=1e-7)
    assert len(last_report(compiled).whole) == 2  # the first takes the count for a constant


def test_regions_serve_all_counts_too() -> None:
    step = counting_program(OF_A_COUNT["log"])[1]
    compiled = compile_step(step, dtype="float32", capture="regions")
    for _ in range(CALLS):
        compiled(X)
    kinds = [region.kind for region in last_report(compiled).regions]
    assert kinds.count(GraphKind.TRAINING) == 2


def test_each_count_is_compiled_anew_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_functions, "is_running", lambda: False)

    def build() -> Program:
        return counting_program(OF_A_COUNT["warm-up of an average"])

    compiled = check_whole(build, X, num_calls=CALLS)
    assert len(last_report(compiled).whole) == CALLS


def test_what_is_constant_or_may_have_complex_powers_is_left_to_python() -> None:
    def weigh(count: int) -> float:
        return math.exp(-0.5) + math.pow(4.0, 0.5) + math.pow(-count, 2)

    compiled = check_whole(lambda: counting_program(weigh), X, num_calls=CALLS)
    assert len(last_report(compiled).whole) == CALLS
