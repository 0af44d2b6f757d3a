"""The pipeline: which passes there are, in which order, and what each declares."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpcompile
import mpcompile.passes
from mpcompile.config import BUILT_PASSES, PASS_NAMES, Config
from mpcompile.pass_base import GraphPass, Stage
from mpcompile.pass_manager import PassManager
from mpcompile.pipeline import PIPELINE, build_manager
from tests.checking import f32, parameter

EACH = pytest.mark.parametrize("item", PIPELINE, ids=lambda item: item.name)


def test_pipeline_holds_the_built_passes_in_the_documented_order() -> None:
    names = [item.name for item in PIPELINE]
    assert names == list(BUILT_PASSES)
    assert names == [name for name in PASS_NAMES if name in names]


def test_pipeline_holds_every_public_pass_once() -> None:
    assert sorted(type(item).__name__ for item in PIPELINE) == sorted(mpcompile.passes.__all__)


def test_order_satisfies_what_the_passes_declare() -> None:
    build_manager(Config())


@pytest.mark.parametrize("late", ["assign-precision", "insert-casts"])
def test_pass_moved_to_the_end_is_an_error(late: str) -> None:
    moved = sorted(PIPELINE, key=lambda item: item.name == late)
    with pytest.raises(ValueError, match=f"must run after {late}"):
        PassManager(moved, Config())


@EACH
def test_pass_is_named_after_its_file(item: GraphPass) -> None:
    stem = type(item).__module__.rsplit(".", 1)[-1]
    assert item.name == stem.replace("_", "-")
    assert type(item).__name__ == "".join(part.title() for part in stem.split("_"))
    assert (Path(__file__).parent / "passes" / f"test_{stem}.py").is_file()


@EACH
def test_pass_is_a_frozen_value_that_prints_its_options(item: GraphPass) -> None:
    again = type(item)()
    assert again == item
    assert hash(again) == hash(item)
    fields = dataclasses.fields(item)  # type: ignore[arg-type]  # each pass is one
    options = ", ".join(f"{field.name}={field.default}" for field in fields)
    assert repr(again) == repr(item) == f"{type(item).__name__}({options})"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(item, "name", "other")  # noqa: B010  # what a checker would refuse


@EACH
def test_pass_says_what_it_means_when_off(item: GraphPass) -> None:
    assert item.off
    assert item.stage in Stage
    assert set(item.runs_after) <= set(BUILT_PASSES)


@EACH
def test_each_pass_can_be_switched_off_alone(item: GraphPass) -> None:
    weight, labels = parameter(4, 4), torch.tensor([0, 1])

    def step(x: Tensor) -> Tensor:
        hidden = torch.relu(x @ weight) @ weight
        return torch.nn.functional.cross_entropy(hidden, labels)

    x = f32(2, 4)
    report = mpcompile.explain(step, x, options={"disable": [item.name]})
    (region,) = report.regions
    on = {record.name: record.enabled for record in region.pass_records}
    assert on == {name: name != item.name for name in BUILT_PASSES}
    options: dict[str, Any] = {"lowering": "eager", "disable": [item.name]}
    compiled = torch.compile(step, backend="mpcompile", options=options)
    loss = compiled(x)
    loss.backward()
    assert loss.dtype is torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    # Two products of rounded operands in a loss of about 1 to 10.
    torch.testing.assert_close(loss, step(x), atol=0.1, rtol=0.05)


def test_all_passes_off_is_the_program_bit_for_bit() -> None:
    weight = parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        return torch.relu(x @ weight).square().mean()

    x = f32(2, 4)
    options: dict[str, Any] = {"lowering": "eager", "disable": list(BUILT_PASSES)}
    loss = torch.compile(step, backend="mpcompile", options=options)(x)
    loss.backward()
    expected = step(x)
    (gradient,) = torch.autograd.grad(expected, [weight])
    assert torch.equal(loss, expected)
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient)
