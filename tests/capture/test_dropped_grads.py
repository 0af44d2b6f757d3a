"""``grads="drop"``: what trains is as in eager, and a step that clears first leaves no gradient."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.runtime import ops
from tests.capture.patterns import gradients
from tests.capture.patterns.registry import PATTERNS, TOLERANCE, network, pair
from tests.programs import Program, compare
from tests.steps import batch, classifier_step, compile_step

PATTERNS_OF_GRADS = sorted(
    name for name, build in PATTERNS.items() if build.__module__ == gradients.__name__
)


def first(read: Callable[[Any, Any], Any] = lambda model, opt: None) -> Callable[[], Program]:
    """Return a program that clears first and returns what ``read`` gives behind the update."""

    def build() -> Program:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, y: Tensor) -> Any:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach(), read(model, opt)

        return Program(step, model, [opt], pair)

    return build


def grads_of(model: Any) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]


def unlike_eager(build: Callable[[], Program], **options: Any) -> tuple[list[str], Any, Any]:
    """Return what differs from eager but for gradients that are None, the step and the model."""
    built: list[Program] = []

    def noted() -> Program:
        built.append(build())
        return built[-1]

    found, compiled = compare(noted, grads="drop", disable=["fuse-updates"], **options)
    kept = [
        text
        for text in found
        if not (".grad: " in text and text.endswith("!= None")) and "shared gradients" not in text
    ]
    return kept, compiled, built[-1].model


@pytest.mark.parametrize("name", PATTERNS_OF_GRADS)
def test_patterns_of_gradients_train_as_eager(name: str) -> None:
    found, _, _ = unlike_eager(PATTERNS[name], tolerance=TOLERANCE.get(name, 0.0))
    assert found == []


@pytest.mark.parametrize("capture", ["whole", "regions"])
def test_cleared_first_leaves_none(capture: str) -> None:
    build = first()
    built: list[nn.Module] = []

    def noted() -> Program:
        program = build()
        built.append(program.model)
        return program

    found, compiled = compare(noted, capture=capture, grads="drop", tolerance=2e-6)
    model = built[-1]
    assert {text.split(": ")[1] for text in found} == {
        *(f"{name}.grad" for name, _ in model.named_parameters()),
    }
    assert grads_of(model) == [None] * 4
    assert bool(last_report(compiled).whole) == (capture == "whole")


def test_gradients_are_16_bit_and_die_at_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    program = first()()
    step = compile_step(program.step, grads="drop", check="off")
    seen: list[weakref.ref[Tensor]] = []
    dtypes: set[torch.dtype] = set()
    run_update = ops.run_update

    def watched(handle: str, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.extend(weakref.ref(grad) for grad in grads)
        dtypes.update(grad.dtype for grad in grads if grad.dim() > 1)
        return run_update(handle, grads, *args, **kwargs)

    monkeypatch.setattr(ops, "run_update", watched)
    step(*pair(0))
    assert dtypes == {torch.bfloat16}
    assert len(seen) == 4
    assert all(grad() is None for grad in seen)


def test_reading_a_gradient_behind_the_update_gives_that_of_eager() -> None:
    found, compiled, model = unlike_eager(first(lambda model, opt: model[0].weight.grad.norm()))
    assert found == []
    assert last_report(compiled).whole
    assert grads_of(model) == [None] * 4


def test_code_behind_a_graph_break_still_sees_gradients() -> None:
    def read(model: Any, opt: Any) -> list[float]:
        torch._dynamo.graph_break()
        return [float(param.grad.norm()) for param in model.parameters()]

    found, compiled, model = unlike_eager(first(read))
    assert found == []
    assert last_report(compiled).whole
    assert grads_of(model) == [None] * 4


def test_update_twice_from_one_gradient_adds_as_eager() -> None:
    def again(model: Any, opt: Any) -> None:
        F.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3)).backward()
        opt.step()

    found, _, model = unlike_eager(first(again))
    assert found == []
    assert grads_of(model) == [None] * 4


def test_two_optimizers_whose_backwards_meet() -> None:
    def build() -> Program:
        model = nn.ModuleDict({"d": network(0), "g": nn.Linear(6, 6)})
        opts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]

        def step(x: Tensor, y: Tensor) -> Tensor:
            opts[0].zero_grad()
            loss = F.mse_loss(model["d"](model["g"](x).detach()), y)
            loss.backward()
            opts[0].step()
            opts[1].zero_grad()
            other = -F.mse_loss(model["d"](model["g"](x)), y)
            other.backward()
            opts[1].step()
            return loss.detach() + other.detach()

        return Program(step, model, opts, pair)

    found, compiled, model = unlike_eager(build)
    assert found == []
    assert last_report(compiled).whole
    assert grads_of(model) == [None] * 6


@pytest.mark.parametrize("capture", ["whole", "regions"])
def test_gradients_that_a_later_call_adds_to_are_kept_with_a_warning(capture: str) -> None:
    def build() -> Program:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        return Program(step, model, [opt], pair)

    found, _ = compare(build, capture=capture, grads="drop", tolerance=2e-6)
    assert found == []
    program = build()
    step = compile_step(program.step, capture=capture, grads="drop")
    with pytest.warns(UserWarning, match=r"grads='drop' keeps 4 of 4 gradients \(SGD, parameter 0"):
        step(*pair(0))


@pytest.mark.filterwarnings("error:mpcompile")
def test_cleared_last_needs_no_option_and_gets_no_warning() -> None:
    model, step = classifier_step()
    compiled = compile_step(step, grads="drop")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mpcompile")
        compiled(*batch())
    assert not any(isinstance(grad, Tensor) for grad in grads_of(model))


def test_float16_drops_as_well() -> None:
    torch.manual_seed(0)
    program = first()()
    before = [param.detach().clone() for param in program.model.parameters()]
    step = compile_step(program.step, grads="drop", dtype="float16")
    for call in range(3):
        step(*pair(call))
    assert grads_of(program.model) == [None] * 4
    pairs = zip(before, program.model.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)
