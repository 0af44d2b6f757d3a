"""A backward that goes through values from before an update: errors, 16 bits, skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpcompile.backend import last_report
from tests.capture.patterns import carried
from tests.capture.patterns.registry import pair
from tests.programs import Program
from tests.steps import compile_step


def train(program: Program, calls: int = 3, **options: object) -> tuple[list[Tensor], Any]:
    """Return the losses of ``calls`` calls, and the compiled step."""
    step = compile_step(program.step, **options)
    return [step(*pair(call)) for call in range(calls)], step


def states(program: Program) -> list[Tensor]:
    """Return copies of parameters and optimizer state."""
    found = [param.detach().clone() for param in program.model.parameters()]
    for optimizer in program.optimizers:
        for entry in optimizer.state.values():
            found += [value.clone() for value in entry.values()]
    return found


def test_the_report_tells_of_it() -> None:
    _, step = train(carried.gan_that_judges_one_fake_twice(), calls=1, dtype="float32")
    (told,) = last_report(step).whole
    assert "Adam update > region 1 > backward through earlier regions > region 2" in told


def test_a_parameter_that_has_changed_is_an_error_as_in_eager() -> None:
    eager = carried.backward_through_a_parameter_that_has_changed()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        eager.step(*pair(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(carried.backward_through_a_parameter_that_has_changed(), dtype="float32")


def test_differentiating_twice_across_an_update_is_left_to_regions_with_the_line() -> None:
    program = carried.gradient_penalty_across_an_update()
    step = compile_step(program.step, dtype="float32")
    step(*pair(0))
    reason, line = last_report(step).breaks[0]
    assert "differentiated again" in reason
    assert "carried.py" in line


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_stay_near_float32(dtype: str) -> None:
    eager = carried.gan_that_judges_one_fake_twice()
    expected = [eager.step(*pair(call)) for call in range(3)]
    ours = carried.gan_that_judges_one_fake_twice()
    losses, step = train(ours, dtype=dtype)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-2)
    assert all(region.casts for region in last_report(step).regions[:2])


def test_an_overflow_leaves_everything_as_it_was() -> None:
    program = carried.gan_that_judges_one_fake_twice()
    _, step = train(program, calls=1, dtype="float16")
    before = states(program)
    step(torch.full((5, 6), 1e5), pair(0)[1])
    assert all(map(torch.equal, before, states(program)))
    losses = [step(*pair(call)) for call in range(2)]
    assert all(loss.isfinite() for loss in losses)
    assert not all(map(torch.equal, before, states(program)))


def test_through_inductor() -> None:
    expected, _ = train(carried.gan_that_judges_one_fake_twice(), dtype="float32")
    found, _ = train(carried.gan_that_judges_one_fake_twice(), dtype="float32", lowering="inductor")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
