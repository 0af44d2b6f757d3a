"""bucket-allreduce gathers reductions of gradients; numbers are those of one all-reduce each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpcompile.config import Config
from mpcompile.errors import PassError
from mpcompile.graph import nodes
from mpcompile.inspection.measure import measure_buckets
from mpcompile.passes import BucketAllreduce
from tests.checking import (
    Traced,
    assert_same,
    check_disabled_by_name,
    check_left_alone,
    check_rewrite,
    f32,
    trace_function,
)

REDUCE = "_c10d_functional.all_reduce"
WAIT = "_c10d_functional.wait_tensor"


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """A group of two ranks that hand back what they are given: a sum is the local value."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def mean(grad: Tensor, world: int = 2) -> Tensor:
    """Reduce one gradient as a captured step does."""
    return reduce(grad / world, "sum")


def reduce(value: Tensor, operation: str) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(value, operation, "0")
    reduced: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return reduced


def backward(x: Tensor, w: Tensor) -> list[Tensor]:
    """Two gradients, one after the other, both clipped when all are there."""
    late = torch.ops.aten.relu(w)
    means = [mean(torch.ops.aten.t(x)), mean(late)]
    norm = torch.stack([value.square().sum() for value in means]).sum().sqrt()
    return [value / norm for value in means]


def trace(function: Any, inputs: list[Tensor], **options: object) -> Traced:
    return trace_function(function, inputs, Config.from_options(options, environ={}))


def reduced_dtypes(traced: Traced) -> list[torch.dtype | None]:
    return [nodes.dtype_of(node) for node in traced.find(REDUCE)]


def test_one_gradient_is_sent_in_sixteen_bits() -> None:
    check_rewrite(
        BucketAllreduce(),
        lambda x: mean(torch.ops.aten.relu(x)),
        [f32(2, 4)],
        before="""
            %x_1: f32[2,4] = placeholder
            %relu: f32[2,4] = aten.relu(%x_1)
            %div: f32[2,4] = aten.div(%relu, 2)
            %all_reduce: f32[2,4] = _c10d_functional.all_reduce(%div, sum, 0)
            %wait_tensor: f32[2,4] = _c10d_functional.wait_tensor(%all_reduce)
            return %wait_tensor
        """,
        after="""
            %x_1: f32[2,4] = placeholder
            %relu: f32[2,4] = aten.relu(%x_1)
            %view_default: f32[8] = aten.view(%relu, [8])
            %cat_default: f32[8] = aten.cat([%view_default])
            %mul_tensor: f32[8] = aten.mul(%cat_default, 0.5)
            %_to_copy_default: bf16[8] = aten._to_copy(%mul_tensor, dtype=bf16)
            %all_reduce_default: bf16[8] = _c10d_functional.all_reduce(%_to_copy_default, sum, 0)
            %wait_tensor_default: bf16[8] = _c10d_functional.wait_tensor(%all_reduce_default)
            %slice_tensor: bf16[8] = aten.slice(%wait_tensor_default, 0, 0, 8)
            %view_default_1: bf16[2,4] = aten.view(%slice_tensor, [2, 4])
            %_to_copy_default_1: f32[2,4] = aten._to_copy(%view_default_1, dtype=f32)
            return %_to_copy_default_1
        """,
        rewrites=1,
        rtol=2**-8,
    )


def test_gradients_share_a_bucket_in_the_order_in_which_they_come_to_be() -> None:
    traced = trace(backward, [f32(2, 4), f32(3)], wire_dtype="float16")
    assert traced.run(BucketAllreduce()) == 2
    assert reduced_dtypes(traced) == [torch.float16]
    bucket = traced.only(REDUCE).meta["bucket"]
    assert (bucket.names, bucket.sizes, bucket.wire_bytes) == (("relu", "t"), (3, 8), 22)


def test_bucket_starts_behind_its_last_gradient_and_is_waited_for_at_its_first_use() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        grad = torch.ops.aten.relu(x)
        later = torch.ops.aten.sigmoid(w)
        value = mean(grad)
        return [value * 2, later]

    traced = trace(function, [f32(4), f32(3)])
    traced.run(BucketAllreduce())
    order = [node.name for node in traced.graph.nodes]
    start, wait = order.index(traced.only(REDUCE).name), order.index(traced.only(WAIT).name)
    assert start < order.index("sigmoid") < wait < order.index("mul")


def test_value_with_many_readers_is_reduced_once_and_handed_to_all() -> None:
    def function(x: Tensor) -> list[Tensor]:
        grad = torch.ops.aten.relu(x)
        value = mean(grad)
        return [value + 1, value * grad, value]

    traced = trace(function, [f32(4)])
    expected = traced.compute()
    assert traced.run(BucketAllreduce()) == 1
    assert len(traced.find(REDUCE)) == 1
    assert_same(traced.compute(), expected, rtol=2**-7)


def test_second_run_finds_nothing() -> None:
    traced = trace(backward, [f32(2, 4), f32(3)])
    traced.run(BucketAllreduce())
    check_left_alone(BucketAllreduce(), traced)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: reduce(x / 2, "max"),
        lambda x: reduce(x * 2, "sum"),
    ],
)
def test_other_collectives_are_left_alone(function: Any) -> None:
    check_left_alone(BucketAllreduce(), trace_function(function, [f32(4)]))


@pytest.mark.parametrize(
    ("wire", "tolerance"), [("float32", 0.0), ("float16", 2**-10), ("bfloat16", 2**-7)]
)
def test_numbers_are_those_of_one_reduction_each(wire: str, tolerance: float) -> None:
    inputs = [f32(2, 4), f32(3)]
    expected = trace(backward, inputs).compute()
    traced = trace(backward, inputs, wire_dtype=wire)
    traced.run(BucketAllreduce())
    assert_same(traced.compute(), expected, rtol=tolerance)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_what_is_divided_before_and_after_makes_the_mean(world: int) -> None:
    traced = trace(lambda x: mean(torch.ops.aten.relu(x), world), [f32(64)], wire_dtype="float16")
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert_same(traced.compute(), expected, rtol=2**-10, atol=1e-6)


def test_first_bucket_is_small_and_the_others_are_filled() -> None:
    def function(x: Tensor) -> list[Tensor]:
        grads = [torch.ops.aten.mul(x, float(factor)) for factor in range(2, 9)]
        return [mean(grad) for grad in grads]

    traced = trace(function, [f32(16)])
    assert traced.run(BucketAllreduce(first_bucket_bytes=100, bucket_bytes=150)) == 7
    buckets = [node.meta["bucket"] for node in traced.find(REDUCE)]
    assert [len(bucket.names) for bucket in buckets] == [2, 3, 2]
    assert [bucket.index for bucket in buckets] == [0, 1, 2]


def test_dtypes_do_not_share_a_bucket_and_only_float32_is_cast() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [mean(torch.ops.aten.relu(x)), mean(torch.ops.aten.relu(y))]

    traced = trace(function, [f32(4), f32(4).double()], wire_dtype="float16")
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert set(reduced_dtypes(traced)) == {torch.float16, torch.float64}
    assert_same(traced.compute(), expected, rtol=2**-10)


def test_error_feedback_is_refused_in_a_graph() -> None:
    traced = trace(backward, [f32(2, 4), f32(3)], error_feedback=True)
    with pytest.raises(PassError, match=r"%t is reduced inside a graph.*capture"):
        traced.run(BucketAllreduce())


def test_disabled_by_name() -> None:
    check_disabled_by_name(BucketAllreduce(), trace(backward, [f32(2, 4), f32(3)]))


def test_measure_says_where_buckets_start_and_are_waited_for() -> None:
    traced = trace(backward, [f32(2, 4), f32(3)], wire_dtype="float16")
    traced.run(BucketAllreduce())
    (found,) = measure_buckets(traced.graph)
    order = list(traced.graph.nodes)
    assert order[found.start] is traced.only(REDUCE)
    assert order[found.wait] is traced.only(WAIT)
    assert found.num_nodes == len(order)
