"""insert-casts: one cast per value and dtype, and nothing visible changes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile.errors import PassError
from mpcompile.graph import decisions, nodes
from mpcompile.graph.roles import InputRole
from mpcompile.graph.verify import visible_types
from mpcompile.passes import AssignPrecision, InsertCasts
from mpcompile.precision import Decision, Precision
from tests.checking import (
    Traced,
    assert_same,
    check_disabled_by_name,
    check_left_alone,
    check_rewrite,
    dtypes,
    f32,
    input_dtypes,
    parameter,
    trace_function,
    trace_step,
)

# One rounding of bf16 is half a unit in the last of 8 bits; a sum of four products of normal
# numbers whose operands and result are rounded stays within a few of them.
ROUNDED = {"atol": 0.06, "rtol": 0.02}


def run_both(traced: Traced) -> int:
    traced.run(AssignPrecision())
    return traced.run(InsertCasts())


def test_matrix_product_gets_16_bit_inputs_and_an_fp32_result() -> None:
    check_rewrite(
        InsertCasts(),
        lambda x, w: (x @ w).cos().sum(),
        [f32(2, 4), parameter(4, 4)],
        prepare=[AssignPrecision()],
        before="""
            %x_1: f32[2,4] = placeholder
            %w_1: f32[4,4] = placeholder
            %mm: f32[2,4] = aten.mm(%x_1, %w_1)
            %cos: f32[2,4] = aten.cos(%mm)
            %sum_1: f32[] = aten.sum(%cos)
            return %sum_1
        """,
        after="""
            %x_1: f32[2,4] = placeholder
            %w_1: f32[4,4] = placeholder
            %_to_copy_default_1: bf16[4,4] = aten._to_copy(%w_1, dtype=bf16)
            %_to_copy_default: bf16[2,4] = aten._to_copy(%x_1, dtype=bf16)
            %mm: bf16[2,4] = aten.mm(%_to_copy_default, %_to_copy_default_1)
            %_to_copy_default_2: f32[2,4] = aten._to_copy(%mm, dtype=f32)
            %cos: f32[2,4] = aten.cos(%_to_copy_default_2)
            %sum_1: f32[] = aten.sum(%cos)
            return %sum_1
        """,
        rewrites=3,
        atol=0.1,  # eight cosines of products that are each off by about a hundredth
        rtol=0.05,
    )


def test_graph_without_decisions_is_left_alone() -> None:
    check_left_alone(InsertCasts(), trace_function(lambda x, w: x @ w, [f32(2, 4), f32(4, 4)]))


def test_graph_that_stays_fp32_is_left_alone() -> None:
    traced = trace_function(lambda x: x.exp().sum(), [f32(2, 4)])
    traced.run(AssignPrecision())
    check_left_alone(InsertCasts(), traced)


def test_many_readers_share_one_cast_per_dtype() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = x @ w
        return x @ w.t(), x @ w, product.exp(), product.log(), product @ w

    traced = trace_function(program, [f32(4, 4), parameter(4, 4)])
    run_both(traced)
    made = [(cast.args[0], nodes.dtype_of(cast)) for cast in traced.casts()]
    assert len(made) == len(set(made))
    x, w = traced.graph.find_nodes(op="placeholder")
    assert [source for source, _ in made].count(x) == 1
    assert [source for source, _ in made].count(w) == 1


def test_value_used_twice_by_one_op_is_cast_once() -> None:
    traced = trace_function(lambda x: x @ x, [f32(4, 4)])
    assert run_both(traced) == 2
    (product,) = traced.find("aten.mm")
    assert product.args[0] is product.args[1]


def test_chain_of_products_stays_16_bit_between_them() -> None:
    def program(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).relu()
        return x

    traced = trace_function(program, [f32(2, 4), *[parameter(4, 4) for _ in range(3)]])
    expected = traced.compute()
    assert run_both(traced) == 5  # x, three weights, the result
    assert dtypes(traced.find("aten.mm")) == [torch.bfloat16] * 3
    torch.testing.assert_close(traced.compute(), expected, atol=0.5, rtol=0.05)  # three products


def test_numbers_are_those_of_inputs_rounded_by_hand() -> None:
    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        return (x.bfloat16() @ w.bfloat16()).relu().float()

    traced = trace_function(lambda x, w: (x @ w).relu(), [f32(8, 4), f32(4, 4)])
    run_both(traced)
    found, x, w = traced.compute()
    assert_same([found], [by_hand(x, w)])


def test_numbers_stay_within_a_rounding_of_fp32() -> None:
    traced = trace_function(lambda x, w: (x @ w).relu(), [f32(8, 4), f32(4, 4)])
    expected = traced.compute()
    run_both(traced)
    assert_same(traced.compute(), expected, **ROUNDED)


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def convnet_step() -> Traced:
    net = convnet()
    return trace_step(lambda x: net(x).square().mean(), f32(2, 3, 4, 4))


def test_gradients_and_loss_keep_their_type() -> None:
    traced = convnet_step()
    before = visible_types(traced.graph)
    assert run_both(traced) > 0
    assert visible_types(traced.graph) == before
    assert {item.dtype for item in before} == {torch.float32, torch.int64}


def test_batchnorm_writes_fp32_statistics_and_integer_counts() -> None:
    traced = convnet_step()
    run_both(traced)
    pairs = [nodes.input_nodes(node) for node in traced.find("aten.copy_")]
    assert {traced.roles.inputs[target] for target, _ in pairs} == {InputRole.BUFFER}
    written = dtypes([source for _, source in pairs])
    assert written == [torch.int64, torch.float32, torch.float32]


def test_batchnorm_buffers_follow_eager_within_a_rounding() -> None:
    torch.manual_seed(0)
    eager = convnet()
    compiled = convnet()
    compiled.load_state_dict(eager.state_dict())
    inputs = f32(8, 3, 4, 4)
    eager(inputs).square().mean().backward()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = compiled(x).square().mean()
        loss.backward()
        return loss.detach()

    run = torch.compile(step, backend="mpcompile", options={"lowering": "eager"})
    assert run(inputs).dtype is torch.float32
    for found, wanted in zip(compiled.buffers(), eager.buffers(), strict=True):
        assert_same([found], [wanted], **ROUNDED)
    for found, wanted in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert found.grad.dtype is torch.float32
        assert_same([found.grad], [wanted.grad], **ROUNDED)


def test_integer_complex_and_float64_values_are_untouched() -> None:
    def program(i: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return i @ i, c @ c, (d @ d).exp()

    double = torch.randn(4, 4, dtype=torch.float64)
    inputs = [torch.ones(4, 4, dtype=torch.int64), torch.complex(f32(4, 4), f32(4, 4)), double]
    traced = trace_function(program, inputs)
    before = traced.text
    run_both(traced)
    assert traced.text == before


def test_float64_beside_16_bit_values_is_untouched() -> None:
    def program(x: Tensor, w: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w, d @ d

    traced = trace_function(
        program, [f32(4, 4), parameter(4, 4), torch.randn(4, 4, dtype=torch.float64)]
    )
    expected = traced.compute()
    run_both(traced)
    assert dtypes(traced.find("aten.mm")) == [torch.bfloat16, torch.float64]
    assert_same(traced.compute()[1:], expected[1:])


def test_fp32_value_that_meets_float64_is_widened_first() -> None:
    def program(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
        return (x @ w) + d

    traced = trace_function(
        program, [f32(4, 4), parameter(4, 4), torch.randn(4, 4, dtype=torch.float64)]
    )
    run_both(traced)
    assert dtypes(traced.find("aten.add")) == [torch.float64]


def test_comparison_reads_16_bit_values_as_they_are() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).argmax(-1)

    traced = trace_function(program, [f32(4, 4), parameter(4, 4)])
    run_both(traced)
    assert input_dtypes(traced.find("aten.argmax")[0]) == [torch.bfloat16]


def test_comparison_of_16_bit_and_fp32_values_is_made_in_fp32() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) > x

    traced = trace_function(program, [f32(4, 4), parameter(4, 4)])
    run_both(traced)
    assert input_dtypes(traced.find("aten.gt")[0]) == [torch.float32] * 2


def test_strides_that_a_later_view_relies_on_are_kept() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        turned = (x @ w).t()
        return turned, turned.exp()

    traced = trace_function(program, [f32(2, 4), parameter(4, 3)])
    before = visible_types(traced.graph)
    run_both(traced)
    assert visible_types(traced.graph) == before


def test_output_with_gaps_gets_its_strides_back() -> None:
    traced = trace_function(lambda x, w: (x @ w)[:, ::2], [f32(2, 4), parameter(4, 6)])
    expected = traced.compute()
    before = visible_types(traced.graph)
    run_both(traced)
    assert visible_types(traced.graph) == before
    assert_same(traced.compute(), expected, **ROUNDED)


def test_expanded_output_gets_its_strides_back() -> None:
    traced = trace_function(
        lambda x, w: (x @ w).unsqueeze(1).expand(2, 3, 4).relu(), [f32(2, 4), parameter(4, 4)]
    )
    before = visible_types(traced.graph)
    run_both(traced)
    assert visible_types(traced.graph) == before


def test_strided_input_is_cast_so_that_a_view_behind_it_still_works() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        rows = x.transpose(0, 1)
        return (rows.reshape(-1, 4) @ w).view(3, 2, 4).transpose(0, 1).reshape(6, 4) @ w

    traced = trace_function(program, [f32(2, 3, 4), parameter(4, 4)])
    expected = traced.compute()
    run_both(traced)
    assert_same(traced.compute(), expected, atol=0.5, rtol=0.05)  # two products


def test_channels_last_convolution_keeps_its_strides() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w).relu()

    x = f32(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    traced = trace_function(program, [x, parameter(4, 3, 3, 3)])
    before = visible_types(traced.graph)
    run_both(traced)
    assert visible_types(traced.graph) == before


def test_shape_and_device_of_a_0_dim_result_stay() -> None:
    traced = trace_function(lambda x, y: torch.dot(x, y), [f32(4), f32(4)])
    before = visible_types(traced.graph)
    run_both(traced)
    assert visible_types(traced.graph) == before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.inner(x))


def checkpointed_step() -> Traced:
    block = Block()

    def step(x: Tensor) -> Tensor:
        hidden = checkpoint(block, x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        return hidden.square().mean()

    traced = trace_step(step, f32(2, 4))
    run_both(traced)
    return traced


def test_every_cast_carries_a_value_and_the_users_line() -> None:
    traced = checkpointed_step()
    assert traced.casts()
    for node in traced.casts():
        assert nodes.dtype_of(node) in (torch.bfloat16, torch.float32)
        assert nodes.user_line(node).endswith(tuple("0123456789"))


def test_cast_of_a_parameter_carries_the_module_of_its_reader() -> None:
    traced = checkpointed_step()
    (product,) = traced.forward("aten.addmm")
    modules = {nodes.module_path(arg) for arg in nodes.input_nodes(product)}
    assert modules == {nodes.module_path(product)}
    assert nodes.module_path(product).endswith("inner")


def test_casts_in_a_checkpointed_region_are_recomputed_with_it() -> None:
    traced = checkpointed_step()
    (product,) = traced.forward("aten.addmm")
    assert product.meta["recompute"] is not None
    made = [node for node in [*nodes.input_nodes(product), *product.users] if nodes.is_cast(node)]
    assert len(made) >= 3
    for node in made:
        assert node.meta["recompute"] == product.meta["recompute"]
        assert node.meta["ac_graph_id"] == product.meta["ac_graph_id"]


def test_casts_of_backward_values_are_backward_nodes() -> None:
    traced = checkpointed_step()
    sources = [node for node in traced.casts() if nodes.is_backward(cast(Any, node.args[0]))]
    assert sources
    assert all(nodes.is_backward(node) for node in sources)


def test_cast_of_a_tangent_is_a_backward_node() -> None:
    weight = parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        return x @ weight

    traced = trace_step(step, f32(2, 4))
    run_both(traced)
    (tangent,) = [node for node, role in traced.roles.inputs.items() if role is InputRole.TANGENT]
    assert [nodes.is_cast(node) for node in tangent.users] == [True]
    assert all(nodes.is_backward(node) for node in tangent.users)


def test_op_that_does_not_take_what_was_decided_is_an_error_with_advice() -> None:
    traced = trace_function(lambda x, w: x @ w, [f32(4, 4), f32(4, 4)])
    (product,) = traced.find("aten.mm")
    decisions.put(product, Decision(Precision.HALF, "planted"))
    product.args = (product.args[0], 2)  # no matrix: whatever the dtype, it is refused
    with pytest.raises(PassError, match=r"(?s)insert-casts: %mm.*does not take.*keep_fp32"):
        InsertCasts().run(traced.gm, traced.ctx)


def test_disabled_by_name() -> None:
    traced = trace_function(lambda x, w: x @ w, [f32(2, 4), f32(4, 4)])
    traced.run(AssignPrecision())
    check_disabled_by_name(InsertCasts(), traced)


def test_step_without_the_pass_trains_in_fp32_bit_for_bit() -> None:
    net = convnet()

    def step(x: Tensor) -> Tensor:
        return cast(Tensor, net(x).square().mean())

    inputs = f32(2, 3, 4, 4)
    report = mpcompile.explain(step, inputs, options={"disable": ["insert-casts"]})
    graph = report.regions[0].graph
    assert graph.before == graph.after
