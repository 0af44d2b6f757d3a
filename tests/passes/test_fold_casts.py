"""fold-casts: what is dropped, merged and moved, and what must stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpcompile.graph import nodes
from mpcompile.graph.roles import InputRole
from mpcompile.passes import AssignPrecision, FoldCasts, InsertCasts
from tests.checking import (
    Traced,
    assert_same,
    bf16,
    check_disabled_by_name,
    check_left_alone,
    check_rewrite,
    f32,
    to_f32,
    to_half,
    trace_function,
    trace_step,
)


def roundtrip(x: Tensor) -> Tensor:
    return torch.relu(to_half(to_f32(x)))


def test_widening_round_trip_is_removed() -> None:
    check_rewrite(
        FoldCasts(),
        roundtrip,
        [bf16(2, 4)],
        before="""
            %x_1: bf16[2,4] = placeholder
            %_to_copy: f32[2,4] = aten._to_copy(%x_1, dtype=f32)
            %_to_copy_1: bf16[2,4] = aten._to_copy(%_to_copy, dtype=bf16)
            %relu: bf16[2,4] = aten.relu(%_to_copy_1)
            return %relu
        """,
        after="""
            %x_1: bf16[2,4] = placeholder
            %relu: bf16[2,4] = aten.relu(%x_1)
            return %relu
        """,
        rewrites=1,
    )


def test_narrowing_round_trip_is_kept_because_it_rounds() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(to_f32(to_half(x)))

    check_left_alone(FoldCasts(), trace_function(program, [f32(2, 4)]))


def test_round_trip_through_another_16_bit_dtype_is_kept() -> None:
    def program(x: Tensor) -> Tensor:
        other = torch.ops.aten._to_copy.default(x, dtype=torch.float16)
        return to_half(other) + 1

    check_left_alone(FoldCasts(), trace_function(program, [bf16(2, 4)]))


def test_graph_without_casts_is_left_alone() -> None:
    check_left_alone(FoldCasts(), trace_function(lambda x: (x @ x).relu(), [f32(4, 4)]))


def test_cast_that_also_moves_memory_is_left_alone() -> None:
    def program(x: Tensor) -> Tensor:
        wide = torch.ops.aten._to_copy.default(
            x, dtype=torch.float32, memory_format=torch.channels_last
        )
        return to_half(wide).relu()

    check_left_alone(FoldCasts(), trace_function(program, [bf16(2, 3, 4, 4)]))


def test_wide_readers_of_a_round_trip_keep_the_widened_value() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = to_f32(x)
        return to_half(wide).relu(), to_half(wide).neg(), wide.exp()

    check_rewrite(
        FoldCasts(),
        program,
        [bf16(3)],
        before="""
            %x_1: bf16[3] = placeholder
            %_to_copy: f32[3] = aten._to_copy(%x_1, dtype=f32)
            %_to_copy_1: bf16[3] = aten._to_copy(%_to_copy, dtype=bf16)
            %relu: bf16[3] = aten.relu(%_to_copy_1)
            %_to_copy_2: bf16[3] = aten._to_copy(%_to_copy, dtype=bf16)
            %neg: bf16[3] = aten.neg(%_to_copy_2)
            %exp: f32[3] = aten.exp(%_to_copy)
            return [%relu, %neg, %exp]
        """,
        after="""
            %x_1: bf16[3] = placeholder
            %_to_copy: f32[3] = aten._to_copy(%x_1, dtype=f32)
            %relu: bf16[3] = aten.relu(%x_1)
            %neg: bf16[3] = aten.neg(%x_1)
            %exp: f32[3] = aten.exp(%_to_copy)
            return [%relu, %neg, %exp]
        """,
        rewrites=2,
    )


def test_nested_round_trips_are_all_removed() -> None:
    def program(x: Tensor) -> Tensor:
        return to_half(to_f32(to_half(to_f32(to_half(to_f32(x)))))).relu()

    traced = trace_function(program, [bf16(2, 4)])
    assert traced.run(FoldCasts()) == 3
    assert traced.casts() == []


def test_cast_to_the_same_dtype_is_dropped() -> None:
    traced = trace_function(lambda x: to_half(x).relu(), [bf16(2)])
    assert traced.run(FoldCasts()) == 1
    assert traced.casts() == []


def test_equal_casts_of_one_value_become_one() -> None:
    def program(x: Tensor) -> Tensor:
        return to_half(x).relu() + to_half(x).neg() + to_half(x)

    traced = trace_function(program, [f32(2, 4)])
    expected = traced.compute()
    assert traced.run(FoldCasts()) == 2
    (cast,) = traced.casts()
    assert len(cast.users) == 3
    assert_same(traced.compute(), expected)


def test_casts_of_one_value_to_two_dtypes_stay_two() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        other = torch.ops.aten._to_copy.default(x, dtype=torch.float16)
        return to_half(x).relu(), other.relu()

    check_left_alone(FoldCasts(), trace_function(program, [f32(2, 4)]))


def test_narrowing_cast_moves_in_front_of_a_view() -> None:
    check_rewrite(
        FoldCasts(),
        lambda w: to_half(w.t()).relu(),
        [f32(2, 4)],
        before="""
            %w_1: f32[2,4] = placeholder
            %t: f32[4,2] = aten.t(%w_1)
            %_to_copy: bf16[4,2] = aten._to_copy(%t, dtype=bf16)
            %relu: bf16[4,2] = aten.relu(%_to_copy)
            return %relu
        """,
        after="""
            %w_1: f32[2,4] = placeholder
            %_to_copy: bf16[2,4] = aten._to_copy(%w_1, dtype=bf16)
            %t: bf16[4,2] = aten.t(%_to_copy)
            %relu: bf16[4,2] = aten.relu(%t)
            return %relu
        """,
        rewrites=1,
    )


def test_narrowing_cast_moves_in_front_of_a_chain_of_views() -> None:
    def program(w: Tensor) -> Tensor:
        return to_half(w.t().unsqueeze(0).transpose(1, 2)).relu()

    traced = trace_function(program, [f32(2, 4)])
    expected = traced.compute()
    assert traced.run(FoldCasts()) == 3
    (cast,) = traced.casts()
    assert [arg.op for arg in nodes.input_nodes(cast)] == ["placeholder"]
    assert_same(traced.compute(), expected)


def test_casts_of_two_views_of_a_weight_become_one() -> None:
    def program(w: Tensor) -> Tensor:
        return to_half(w.t()).relu().sum() + to_half(w.view(-1)).relu().sum()

    traced = trace_function(program, [f32(2, 4)])
    expected = traced.compute()
    assert traced.run(FoldCasts()) == 3
    assert len(traced.casts()) == 1
    assert_same(traced.compute(), expected)


def test_cast_behind_a_slice_stays_there_since_it_casts_less() -> None:
    check_left_alone(FoldCasts(), trace_function(lambda w: to_half(w[:1]).relu(), [f32(4, 4)]))


def test_cast_behind_a_view_that_others_read_stays_there() -> None:
    def program(w: Tensor) -> Tensor:
        turned = w.t()
        return to_half(turned).relu() + turned.exp()

    check_left_alone(FoldCasts(), trace_function(program, [f32(4, 4)]))


def test_cast_behind_a_view_of_a_strided_value_stays_there() -> None:
    def program(w: Tensor) -> Tensor:
        return to_half(w[:, ::2].t()).relu()

    check_left_alone(FoldCasts(), trace_function(program, [f32(4, 4)]))


def test_widening_cast_does_not_move_in_front_of_a_view() -> None:
    check_left_alone(FoldCasts(), trace_function(lambda w: to_f32(w.t()).exp(), [bf16(2, 4)]))


def test_weight_of_a_linear_layer_is_cast_once_for_forward_and_backward() -> None:
    w1, w2 = (torch.nn.Parameter(f32(4, 4)) for _ in range(2))

    def step(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, w1), w2).square().sum()

    traced = trace_step(step, f32(3, 4))
    traced.run(AssignPrecision(), InsertCasts())
    expected = traced.compute()
    traced.run(FoldCasts())
    parameters = [node for node, role in traced.roles.inputs.items() if role is InputRole.PARAMETER]
    assert [[nodes.is_cast(user) for user in node.users] for node in parameters] == [[True]] * 2
    assert_same(traced.compute(), expected)


def checkpointed() -> Traced:
    weight = torch.nn.Parameter(f32(4, 4))

    def block(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight).exp()

    def step(x: Tensor) -> Tensor:
        kept = checkpoint(block, x, use_reentrant=False)
        assert isinstance(kept, Tensor)
        again = checkpoint(block, kept, use_reentrant=False)
        assert isinstance(again, Tensor)
        return (again @ weight).square().mean()

    traced = trace_step(step, f32(3, 4))
    traced.run(AssignPrecision(), InsertCasts())
    return traced


def test_casts_of_checkpointed_regions_merge_only_among_themselves() -> None:
    traced = checkpointed()
    expected = traced.compute()
    traced.run(FoldCasts())
    for cast in traced.casts():
        others = [
            other
            for other in traced.casts()
            if other.args == cast.args and nodes.dtype_of(other) is nodes.dtype_of(cast)
        ]
        regions = [(other.meta.get("recompute"), other.meta.get("ac_graph_id")) for other in others]
        assert len(set(regions)) == len(regions)
    assert_same(traced.compute(), expected)


def test_cast_in_a_checkpointed_region_does_not_stand_for_one_outside() -> None:
    def program(x: Tensor) -> Tensor:
        return to_half(x).relu() + to_half(x).neg()

    traced = trace_function(program, [f32(2, 4)])
    traced.casts()[0].meta["recompute"] = "prefer"
    check_left_alone(FoldCasts(), traced)


def test_numbers_of_a_training_step_stay_the_same() -> None:
    weight = torch.nn.Parameter(f32(6, 4))

    def step(x: Tensor) -> Tensor:
        hidden = F.linear(x, weight).view(2, 3, 2).transpose(0, 1).relu()
        return F.mse_loss(F.gelu(hidden).sum(0), hidden.mean(0))

    traced = trace_step(step, f32(2, 4))
    traced.run(AssignPrecision(), InsertCasts())
    expected = traced.compute()
    assert traced.run(FoldCasts()) > 0
    assert_same(traced.compute(), expected)


def test_second_run_on_a_training_step_finds_nothing() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    traced = trace_step(lambda x: layers(x).square().mean(), f32(3, 4))
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    check_left_alone(FoldCasts(), traced)


def test_nodes_never_become_more() -> None:
    traced = checkpointed()
    before = len(traced.graph.nodes)
    traced.run(FoldCasts())
    assert len(traced.graph.nodes) <= before


def test_second_run_finds_nothing() -> None:
    traced = checkpointed()
    traced.run(FoldCasts())
    check_left_alone(FoldCasts(), traced)


def test_disabled_by_name() -> None:
    check_disabled_by_name(FoldCasts(), trace_function(roundtrip, [bf16(2, 4)]))
