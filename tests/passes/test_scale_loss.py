"""scale-loss: tangents are scaled, gradients leave unscaled, updates are guarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter

from mpcompile.graph import nodes
from mpcompile.graph.roles import GraphKind, InputRole
from mpcompile.passes import AssignPrecision, InsertCasts, ScaleLoss
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.scale_state import Field
from tests.checking import (
    Traced,
    assert_same,
    check_disabled_by_name,
    check_left_alone,
    parameter,
    trace_graphs,
    trace_step,
)

CPU = torch.device("cpu")


def scaled(traced: Traced, initial: float = 1024.0) -> LossScale:
    """Give the graph a loss scale that takes its calls for ones inside the step."""
    scale = LossScale(ScalePolicy(initial=initial))
    scale.begin_call()
    traced.ctx.scaled = scale.add_region()
    return scale


def linear_step(**options: object) -> Traced:
    weight, bias = parameter(4, 3), parameter(3)

    def forward(x: Tensor) -> Tensor:
        return F.gelu(x @ weight + bias).sum()

    return trace_step(forward, torch.randn(5, 4), dtype="float16", **options)


def test_tangent_is_scaled_and_gradients_are_unscaled() -> None:
    traced = linear_step()
    scaled(traced)
    traced.run(AssignPrecision(), InsertCasts())
    (tangent,) = (n for n, role in traced.roles.inputs.items() if role is InputRole.TANGENT)
    assert traced.run(ScaleLoss()) == 3  # a tangent, two gradients
    readers = {nodes.op_name(user) for user in tangent.users}
    assert readers == {"mpcompile.loss_scale", "aten.mul"}
    outputs: Any = traced.graph.output_node().args[0]
    gradients = [out for out in outputs[1:] if out is not None]
    assert [nodes.op_name(out) for out in gradients] == ["aten.mul", "aten.mul"]
    (noted,) = traced.find("mpcompile.note_overflow")
    assert len(nodes.input_nodes(noted)) == 3  # the inverse, a sum of each gradient


def test_numbers_are_those_of_the_unscaled_graph() -> None:
    """All is linear and a power of two rounds nothing, where 16 bits have room for both."""
    traced = linear_step()
    scaled(traced)
    traced.run(AssignPrecision(), InsertCasts())
    expected = traced.compute()
    traced.run(ScaleLoss())
    assert_same(traced.compute(), expected, rtol=1e-3, atol=1e-6)


def test_same_numbers_bit_for_bit_in_fp32() -> None:
    traced = linear_step()
    expected = traced.compute()
    scaled(traced)
    traced.run(ScaleLoss())
    assert_same(traced.compute(), expected)


def test_overflow_is_noted_with_the_name_of_the_gradient() -> None:
    traced = linear_step()
    scale = scaled(traced)
    traced.ctx.input_names = tuple(f"input{i}" for i in range(9))
    traced.run(ScaleLoss())
    traced.compute()
    assert scale.state(CPU)[Field.FOUND] == 0
    for node in traced.graph.find_nodes(op="placeholder"):
        if traced.roles.inputs[node] is InputRole.DATA:
            with traced.graph.inserting_before(next(iter(node.users))):
                bad = traced.graph.call_function(torch.ops.aten.mul.Tensor, (node, float("inf")))
            nodes.set_value(bad, nodes.value(node))
            node.replace_all_uses_with(bad, delete_user_cb=lambda user, bad=bad: user is not bad)
    traced.gm.recompile()
    traced.compute()
    assert scale.state(CPU)[Field.FOUND] == 1
    record = scale.record()
    assert record is not None
    assert record.first.startswith("input")


@pytest.mark.parametrize("spoilt", [False, True])
def test_finite_gradients_whose_sum_has_no_room_are_no_overflow(spoilt: bool) -> None:
    traced, scale = trace_update(lambda p: p.sub_(cast(Tensor, p.grad)))
    traced.run(ScaleLoss())
    gradient = torch.full((4,), 3e38)
    gradient[2] = float("inf") if spoilt else -1.0
    _, weight = run_update(traced, gradient)
    assert_same([weight], [torch.zeros(4) if spoilt else -gradient])
    assert scale.state(CPU)[Field.FOUND] == spoilt


def test_graph_without_a_loss_scale_is_left_alone() -> None:
    check_left_alone(ScaleLoss(), linear_step())


def test_inference_graph_is_left_alone() -> None:
    with torch.no_grad():
        (traced,) = trace_graphs(lambda x: x @ x, torch.randn(4, 4), dtype="float16")
    assert traced.roles.kind is GraphKind.INFERENCE
    scaled(traced)
    check_left_alone(ScaleLoss(), traced)


def test_gradient_that_leaves_twice_is_unscaled_once() -> None:
    weight = parameter(4)
    traced = trace_step(lambda x: (x + weight).sum(), torch.randn(4, requires_grad=True))
    scaled(traced)
    expected = traced.compute()
    traced.run(ScaleLoss())
    assert_same(traced.compute(), expected)


def test_several_tangents_get_one_factor() -> None:
    weight = parameter(4, 4)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ weight
        return hidden.sum(), hidden * 2

    traced = trace_step(forward, torch.randn(4, 4))
    scaled(traced)
    expected = traced.compute()
    traced.run(ScaleLoss())
    assert len(traced.find("mpcompile.loss_scale")) == 1
    assert_same(traced.compute(), expected)


def test_expanded_gradient_keeps_its_strides() -> None:
    weight = parameter(3, 4)
    traced = trace_step(lambda x: (weight.sum() + x).sum(), torch.randn(2))
    scaled(traced)
    expected = traced.compute()
    traced.run(ScaleLoss())  # the verifier compares strides
    assert_same(traced.compute(), expected)


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g.clamp(-1e-3, 1e-3),
        lambda g: g / (g.norm() + 1.0),
        lambda g: torch.where(g > 0.01, g, 0.1 * g),
        lambda g: g + 0.125,
        lambda g: g * g,
    ],
    ids=["clamp", "norm", "where", "add", "square"],
)
def test_hook_that_is_not_linear_sees_true_gradients(hook: Callable[[Tensor], Tensor]) -> None:
    weight = parameter(4, 4)

    def forward(x: Tensor) -> Tensor:
        hidden = x @ weight
        hidden.register_hook(hook)
        return hidden.square().mean()

    traced = trace_step(forward, torch.randn(4, 4))
    expected = traced.compute()
    scaled(traced)
    traced.run(ScaleLoss())
    assert_same(traced.compute(), expected, rtol=1e-6, atol=1e-7)


def test_disabled_by_name() -> None:
    traced = linear_step()
    scaled(traced)
    check_disabled_by_name(ScaleLoss(), traced)


# --- a backward in a flat graph ------------------------------------------------------------------


def trace_flat(step: Callable[..., Any], *args: Tensor) -> Traced:
    """Return the ATen graph of a step whose ``backward()`` Dynamo traces."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        (traced,) = trace_graphs(step, *args)
    return traced


def flat_step(weight: nn.Parameter) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.gelu(x @ weight).square().mean()
        loss.backward()
        assert weight.grad is not None
        return loss.detach(), weight.grad.norm()

    return step


def test_flat_backward_is_scaled_at_its_seed() -> None:
    traced = trace_flat(flat_step(parameter(4, 3)), torch.randn(5, 4))
    expected = traced.compute()
    scaled(traced)
    assert traced.run(ScaleLoss()) == 2
    assert len(traced.find("mpcompile.loss_scale")) == 1
    assert len(traced.find("mpcompile.note_overflow")) == 1
    assert_same(traced.compute(), expected, rtol=1e-6)


def test_flat_gradient_of_an_update_stays_scaled() -> None:
    traced = trace_flat(flat_step(parameter(4, 3)), torch.randn(5, 4))
    outputs: Any = traced.graph.output_node().args[0]
    (position,) = (i for i, out in enumerate(outputs) if nodes.value(out).dim() == 2)
    loss, norm, gradient = (traced.compute()[i] for i in range(3))
    scale = scaled(traced)
    assert traced.ctx.scaled is not None
    traced.ctx.updates_read = {"update": (position,)}
    traced.run(ScaleLoss())
    assert traced.ctx.scaled.folded == {"update"}
    assert position == 2
    assert_same(traced.compute()[:3], [loss, norm, gradient * 1024.0], rtol=1e-6)
    assert scale.inverse(CPU) == 1 / 1024


def test_flat_gradient_that_is_accumulated_is_unscaled() -> None:
    """The sum with an older gradient is a true one, so the update must not unscale it."""
    weight = parameter(4, 3)
    weight.grad = torch.randn(4, 3)

    def step(x: Tensor) -> Tensor:
        loss = (x @ weight).mean()
        loss.backward()
        return loss.detach()

    traced = trace_flat(step, torch.randn(5, 4))
    expected = traced.compute()
    outputs: Any = traced.graph.output_node().args[0]
    scaled(traced)
    assert traced.ctx.scaled is not None
    traced.ctx.updates_read = {"update": (len(outputs) - 1,)}
    traced.run(ScaleLoss())
    assert traced.ctx.scaled.folded == frozenset()
    assert_same(traced.compute(), expected, rtol=1e-6, atol=1e-6)


def test_two_backwards_of_a_flat_graph_are_scaled_each() -> None:
    weight = parameter(4, 3)

    def step(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for half in x.split(2):
            loss = F.gelu(half @ weight).square().mean()
            loss.backward()
            total = total + loss.detach()
        return total

    traced = trace_flat(step, torch.randn(4, 4))
    expected = traced.compute()
    scaled(traced)
    assert traced.run(ScaleLoss()) == 4  # two seeds, two gradients
    assert len(traced.find("mpcompile.note_overflow")) == 1
    assert_same(traced.compute(), expected, rtol=1e-6, atol=1e-7)


def test_only_the_outer_of_two_nested_backwards_is_scaled() -> None:
    weight = parameter(4, 3)

    def step(x: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(
            F.gelu(x @ weight).square().mean(), weight, create_graph=True
        )
        inner.square().sum().backward()
        assert weight.grad is not None
        return cast(Tensor, weight.grad.norm())

    traced = trace_flat(step, torch.randn(5, 4))
    expected = traced.compute()
    scaled(traced)
    traced.run(ScaleLoss())
    (factors,) = traced.find("mpcompile.loss_scale")
    ones = traced.find("aten.ones_like")
    assert len(ones) == 2
    assert nodes.input_nodes(factors) == ones[1:]
    assert_same(traced.compute(), expected, rtol=1e-5)


def test_gradient_that_is_data_of_a_later_loss_is_scaled_too() -> None:
    """The second backward reads the first gradient twice, as data and through the convolution."""
    kernel, other = parameter(2, 2, 3), parameter(2, 2, 3)

    def step(x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(F.conv1d(x, kernel).square().sum(), x)
        (F.conv1d(slope, other) * slope[:, :, 1:-1]).sum().backward()
        assert other.grad is not None
        return cast(Tensor, other.grad.norm())

    traced = trace_flat(step, torch.randn(1, 2, 9, requires_grad=True))
    expected = traced.compute()
    scaled(traced)
    traced.run(ScaleLoss())
    assert len(traced.find("mpcompile.loss_scale")) == 1
    assert len([n for n in traced.find("aten.ones_like") if n.users]) == 2
    assert_same(traced.compute(), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradient_that_the_program_gives_is_scaled(dtype: str) -> None:
    weight = parameter(4, 3)

    def step(x: Tensor) -> Tensor:
        result = F.gelu(x @ weight)
        result.backward(torch.sign(result.detach()) * 0.25)
        assert weight.grad is not None
        return cast(Tensor, weight.grad.norm())

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        (traced,) = trace_graphs(step, torch.randn(5, 4), dtype=dtype)
    traced.run(AssignPrecision(), InsertCasts())
    expected = traced.compute()
    scale = scaled(traced, 2.0**20)  # whose products float16 has no room for
    traced.run(ScaleLoss())
    (factors,) = traced.find("mpcompile.loss_scale")
    (seed,) = nodes.input_nodes(factors)
    assert nodes.op_name(seed) == "aten.view"
    if dtype == "float32":
        assert_same(traced.compute(), expected, rtol=1e-6)
    else:
        traced.compute()
        assert scale.state(CPU)[Field.FOUND] == 1


def test_gradients_of_several_scales_of_the_program_get_one_factor() -> None:
    weight = parameter(4, 3)

    def step(x: Tensor) -> Tensor:
        F.gelu(x @ weight).mean().backward()
        F.gelu(x @ weight).sum().backward(torch.tensor(512.0))
        assert weight.grad is not None
        return cast(Tensor, weight.grad.norm())

    traced = trace_flat(step, torch.randn(5, 4))
    expected = traced.compute()
    scaled(traced)
    traced.run(ScaleLoss())
    assert len(traced.find("mpcompile.loss_scale")) == 1
    assert_same(traced.compute(), expected, rtol=1e-6)


# --- updates -------------------------------------------------------------------------------------


def trace_update(update: Callable[[nn.Parameter], Tensor]) -> tuple[Traced, LossScale]:
    """Return the graph of ``update`` on a parameter with a gradient, both of four elements."""
    weight = parameter(4)
    weight.grad = torch.randn(4)
    with torch.no_grad():
        (traced,) = trace_graphs(lambda: [update(weight), None][1])
    assert traced.roles.kind is GraphKind.UPDATE
    return traced, scaled(traced)


def run_update(traced: Traced, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Run the graph; return gradient and parameter behind it, the latter having been zero."""
    weight = torch.zeros(4)
    values = {InputRole.GRADIENT: gradient.clone(), InputRole.PARAMETER: weight}
    inputs = [values[traced.roles.inputs[n]] for n in traced.graph.find_nodes(op="placeholder")]
    Interpreter(traced.gm).run(*inputs)
    return values[InputRole.GRADIENT], weight


INFINITE = torch.tensor([1.0, float("inf"), float("nan"), -1.0])


def test_clamp_of_a_gradient_leaves_what_is_not_finite() -> None:
    traced, _ = trace_update(lambda p: cast(Tensor, p.grad).clamp_(-0.5, 0.5))
    assert traced.run(ScaleLoss()) == 1
    found, _ = run_update(traced, INFINITE)
    expected = torch.tensor([0.5, float("inf"), float("nan"), -0.5])
    assert_same([found], [expected])


def test_scaling_of_a_gradient_is_left_alone() -> None:
    traced, _ = trace_update(lambda p: cast(Tensor, p.grad).mul_(0.5))
    check_left_alone(ScaleLoss(), traced)


def test_update_writes_nothing_if_its_gradient_is_not_finite() -> None:
    traced, scale = trace_update(lambda p: p.sub_(cast(Tensor, p.grad)))
    assert traced.run(ScaleLoss()) == 1
    assert traced.ctx.scaled is not None
    assert traced.ctx.scaled.updates
    assert_same([run_update(traced, INFINITE)[1]], [torch.zeros(4)])
    assert bool(traced.ctx.scaled.flag)
    assert scale.state(CPU)[Field.FOUND] == 1
    assert_same([run_update(traced, torch.ones(4))[1]], [-torch.ones(4)])


def test_update_writes_nothing_if_a_backward_overflowed() -> None:
    traced, scale = trace_update(lambda p: p.sub_(cast(Tensor, p.grad)))
    traced.run(ScaleLoss())
    backward = scale.add_region()
    backward.prepare(CPU, ["weight"])
    scale.note(backward.source, [torch.tensor(float("inf"))])
    assert_same([run_update(traced, torch.ones(4))[1]], [torch.zeros(4)])


def test_write_behind_a_skipped_update_is_left_out() -> None:
    """An average of weights, say."""
    average = torch.zeros(4)
    traced, scale = trace_update(lambda p: average.add_(p))
    assert traced.run(ScaleLoss()) == 1
    assert len(traced.find("mpcompile.skipping")) == 1
    found = [torch.zeros(4), torch.ones(4)]
    for expected, skip in ((1.0, False), (1.0, True)):
        scale.end_update(torch.tensor(skip), None)
        roles = [traced.roles.inputs[n] for n in traced.graph.find_nodes(op="placeholder")]
        inputs = [found[1] if role is InputRole.PARAMETER else found[0] for role in roles]
        Interpreter(traced.gm).run(*inputs)
        assert_same([found[0]], [torch.full((4,), expected)])
