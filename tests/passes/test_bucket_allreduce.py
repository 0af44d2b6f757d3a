"""bucket-allreduce gathers reductions of gradients; numbers are those of one all-reduce each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpcompile.config import Config
from mpcompile.distributed import graph_ops
from mpcompile.distributed.module import ModuleSync, SyncSettings
from mpcompile.graph import gradients, nodes
from mpcompile.graph.printer import format_dtype
from mpcompile.inspection.measure import measure_buckets
from mpcompile.passes import BucketAllreduce
from tests.checking import (
    Traced,
    assert_same,
    check_disabled_by_name,
    check_left_alone,
    f32,
    trace_function,
)

AVERAGE = "mpcompile.average_gradient"
SEND = "mpcompile.send_bucket"
RECEIVE = "mpcompile.receive_bucket"


class Module:
    """A wrapped module of two ranks that hand back what they are given: a sum is the local value.

    So a mean is half of the gradient.
    """

    def __init__(self, wire: torch.dtype = torch.bfloat16, **ddp: Any) -> None:
        self._ddp = DistributedDataParallel(nn.Linear(2, 2), **ddp)
        self.sync = ModuleSync(self._ddp, SyncSettings(wire))

    def mean(self, grad: Tensor, name: str = "weight", turn: int = 0) -> Tensor:
        """Reduce one gradient as a captured step does."""
        found: Tensor = torch.ops.mpcompile.average_gradient(grad, self.sync.handle, name, turn)
        return found

    def compute(self, traced: Traced) -> list[Tensor]:
        """Run a graph that sends what its pass has found."""
        self.sync.begin_graph(self.sync.plan(traced.ctx.buckets[self.sync.handle]))
        return traced.compute()


def backward(module: Module) -> Any:
    """Return a function with two gradients, both clipped when all are there."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        late = torch.ops.aten.relu(w)
        means = [module.mean(torch.ops.aten.t(x), "t"), module.mean(late, "relu")]
        norm = torch.stack([value.square().sum() for value in means]).sum().sqrt()
        return [value / norm for value in means]

    return function


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A module whose handle stands in prints."""
    monkeypatch.setattr(graph_ops, "_num_handles", 0)
    return Module()


def trace(function: Any, inputs: list[Tensor], **options: object) -> Traced:
    return trace_function(function, inputs, Config.from_options(options, environ={}))


def sent(traced: Traced) -> list[Any]:
    return [node.meta["bucket"] for node in traced.find(SEND)]


def test_one_gradient_is_sent_in_a_bucket(module: Module) -> None:
    traced = trace(lambda x: module.mean(torch.ops.aten.relu(x)) * 2, [f32(2, 4)])
    expected = traced.compute()
    assert traced.run(BucketAllreduce()) == 1
    assert [line.split(" = ")[-1] for line in traced.text.splitlines()] == [
        "placeholder",
        "aten.relu(%x_1)",
        "mpcompile.send_bucket(ddp-1, 0, [%relu], f32, None)",
        "mpcompile.receive_bucket(ddp-1, 0, 8, %send_bucket_default, [])",
        "aten.slice(%receive_bucket_default, 0, 0, 8)",
        "aten.view(%slice_tensor, [2, 4])",
        "aten.mul(%view_default, 2)",
        "return %mul",
    ]
    assert_same(module.compute(traced), expected, rtol=2**-8)


def test_graph_without_reductions_is_left_alone() -> None:
    check_left_alone(BucketAllreduce(), trace(lambda x: x * 2, [f32(4)]))


def test_graph_that_sends_nothing_keeps_writes_where_they_are() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y * 2)
        return y * 3

    check_left_alone(BucketAllreduce(), trace(function, [f32(4), f32(4)]))


def test_gradients_share_a_bucket_in_the_order_in_which_they_come_to_be(module: Module) -> None:
    traced = trace(backward(module), [f32(2, 4), f32(3)])
    assert traced.run(BucketAllreduce()) == 2
    (bucket,) = sent(traced)
    assert (bucket.names, bucket.sizes, bucket.wire_bytes) == (("relu", "t"), (3, 8), 22)
    assert traced.ctx.buckets == {module.sync.handle: [bucket]}


def test_bucket_starts_behind_its_last_gradient_and_all_else_comes_before_the_wait(
    module: Module,
) -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        grad = torch.ops.aten.relu(x)
        doubled = module.mean(grad) * 2
        return [doubled, torch.ops.aten.sigmoid(w)]

    traced = trace(function, [f32(4), f32(3)])
    traced.run(BucketAllreduce())
    order = [node.name for node in traced.graph.nodes]
    start, wait = (order.index(traced.only(op).name) for op in (SEND, RECEIVE))
    assert start < order.index("sigmoid") < wait < order.index("mul")


def test_reader_in_front_of_a_later_gradient_of_the_bucket_comes_behind_it(module: Module) -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        first = module.mean(torch.ops.aten.relu(x), "x") * 2
        return [first, module.mean(torch.ops.aten.sigmoid(w), "w")]

    traced = trace(function, [f32(4), f32(3)])
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert [bucket.names for bucket in sent(traced)] == [("x", "w")]
    assert_same(module.compute(traced), expected, rtol=2**-8)


def test_value_with_many_readers_is_reduced_once_and_handed_to_all(module: Module) -> None:
    def function(x: Tensor) -> list[Tensor]:
        grad = torch.ops.aten.relu(x)
        value = module.mean(grad)
        return [value + 1, value * grad, value]

    traced = trace(function, [f32(4)])
    expected = traced.compute()
    assert traced.run(BucketAllreduce()) == 1
    assert len(traced.find(SEND)) == 1
    assert_same(module.compute(traced), expected, rtol=2**-7)


def test_second_run_finds_nothing(module: Module) -> None:
    traced = trace(backward(module), [f32(2, 4), f32(3)])
    traced.run(BucketAllreduce())
    check_left_alone(BucketAllreduce(), traced)


@pytest.mark.parametrize(
    ("wire", "tolerance"),
    [(torch.float32, 0.0), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)],
)
def test_numbers_are_those_of_one_reduction_each(wire: torch.dtype, tolerance: float) -> None:
    module = Module(wire)
    traced = trace(backward(module), [f32(2, 4), f32(3)])
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert {bucket.wire for bucket in sent(traced)} == {wire}
    assert_same(module.compute(traced), expected, rtol=tolerance)


@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_that_may_be_sent_again_stay_until_then(wire: torch.dtype) -> None:
    module = Module(wire)
    traced = trace(backward(module), [f32(2, 4), f32(3)])
    traced.run(BucketAllreduce())
    sent, received = traced.only(SEND), traced.only(RECEIVE)
    assert received.args[-1] == (sent.args[2] if wire is torch.float16 else [])


@pytest.mark.parametrize("world", [1, 3, 8, 64])
def test_what_is_divided_before_and_after_makes_the_mean(world: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    module = Module(torch.float16)
    traced = trace(lambda x: module.mean(torch.ops.aten.relu(x)), [f32(64)])
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert_same(module.compute(traced), expected, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(
    ("wire", "positions", "stay"),
    [
        (torch.bfloat16, [0, 1], [True, True]),
        (torch.float16, [1, 0], [True, True]),
        (torch.float16, [2, 0], [False, True]),  # one of them is no mean
        (torch.float32, [0, 1], []),
    ],
)
def test_update_takes_sums_in_sixteen_bits_as_they_are(
    wire: torch.dtype, positions: list[int], stay: list[bool]
) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    module = Module(wire)

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        grads = [torch.ops.aten.relu(x), torch.ops.aten.sigmoid(w)]
        return [*(module.mean(grad, str(i)) for i, grad in enumerate(grads)), grads[0] * 2]

    traced = trace(function, [f32(2, 4).t(), f32(3)])
    expected = traced.compute()
    traced.graph.output_node().meta[gradients._PRIVATE] = frozenset({0, 1, 2})
    traced.ctx.updates_read = {"update": positions}
    traced.run(BucketAllreduce())
    on_wire = traced.ctx.on_wire.get("update", ())
    assert [item is not None for item in on_wire] == stay
    found = module.compute(traced)
    factors = graph_ops.mean_factors(on_wire or [None] * len(positions))
    for position, factor, stays in zip(positions, factors, stay or [False] * 2, strict=True):
        value = found[position]
        assert value.dtype is (wire if stays else torch.float32)
        assert value.stride() == expected[position].stride()
        assert_same([value.float() * factor], [expected[position]], rtol=2**-7, atol=2**-20)


def test_update_reads_sums_of_two_modules(module: Module) -> None:
    other = Module(torch.float16)

    def function(x: Tensor) -> list[Tensor]:
        return [module.mean(torch.ops.aten.relu(x)), other.mean(torch.ops.aten.sigmoid(x))]

    traced = trace(function, [f32(4)])
    traced.graph.output_node().meta[gradients._PRIVATE] = frozenset({0, 1})
    traced.ctx.updates_read = {"update": [0, 1]}
    traced.run(BucketAllreduce())
    handles = [item.handle for item in traced.ctx.on_wire["update"] if item is not None]
    assert handles == [module.sync.handle, other.sync.handle]


@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16])
def test_gradient_that_was_widened_for_the_wire_is_sent_as_it_is(wire: torch.dtype) -> None:
    module = Module(wire)
    traced = trace(lambda x: module.mean(torch.ops.aten.relu(x).float()), [f32(2, 4).bfloat16()])
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert traced.only(SEND).args[2] == [traced.only("aten.relu")]
    assert not traced.find("aten._to_copy")
    assert [bucket.dtype for bucket in sent(traced)] == [torch.float32]
    assert_same(module.compute(traced), expected, rtol=2**-7)


def test_sum_that_somebody_else_reads_is_widened(module: Module) -> None:
    def function(x: Tensor) -> list[Tensor]:
        mean = module.mean(torch.ops.aten.relu(x))
        return [mean, mean.sum()]

    traced = trace(function, [f32(4)])
    traced.ctx.updates_read = {"update": [0]}
    traced.run(BucketAllreduce())
    assert not traced.ctx.on_wire
    assert "bf16" not in traced.text


def test_first_bucket_is_small_and_the_others_are_filled(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: Tensor) -> list[Tensor]:
        grads = [torch.ops.aten.mul(x, float(factor)) for factor in range(2, 9)]
        return [module.mean(grad, str(index)) for index, grad in enumerate(grads)]

    monkeypatch.setattr(ModuleSync, "capacities", (100, 150))
    traced = trace(function, [f32(16)])
    expected = traced.compute()
    assert traced.run(BucketAllreduce()) == 7
    assert [len(bucket.names) for bucket in sent(traced)] == [2, 3, 2]
    assert [bucket.index for bucket in sent(traced)] == [0, 1, 2]
    starts = traced.find(SEND)
    assert [node.args[-1] for node in starts] == [None, *starts[:2]]
    assert_same(module.compute(traced), expected, rtol=2**-7)


def test_instance_says_how_large_buckets_are() -> None:
    assert Module().sync.capacities == (1 << 20, 25 << 20)
    assert Module(bucket_cap_mb=2).sync.capacities == (2 << 20, 2 << 20)


def test_dtypes_do_not_share_a_bucket_and_only_float32_is_cast(module: Module) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            module.mean(torch.ops.aten.relu(value), name)
            for name, value in zip("xy", (x, y), strict=True)
        ]

    traced = trace(function, [f32(4), f32(4).double()])
    expected = traced.compute()
    traced.run(BucketAllreduce())
    assert {bucket.wire for bucket in sent(traced)} == {torch.bfloat16, torch.float64}
    assert_same(module.compute(traced), expected, rtol=2**-7)


def test_modules_and_backwards_do_not_share_a_bucket(module: Module) -> None:
    other = Module()

    def function(x: Tensor) -> list[Tensor]:
        first = module.mean(torch.ops.aten.relu(x), "x", turn=0)
        return [other.mean(torch.ops.aten.sigmoid(x), "y"), module.mean(first + x, "x", turn=1)]

    traced = trace(function, [f32(4)])
    traced.run(BucketAllreduce())
    found = {handle: [b.names for b in buckets] for handle, buckets in traced.ctx.buckets.items()}
    assert found == {module.sync.handle: [("x",), ("x",)], other.sync.handle: [("y",)]}


def _result(traced: Traced) -> Tensor:
    (node,) = traced.graph.output_node().all_input_nodes
    found: Tensor = nodes.value(node)
    return found


def test_gradient_with_other_strides_keeps_them(module: Module) -> None:
    traced = trace(lambda x: module.mean(torch.ops.aten.relu(x)), [f32(2, 3, 4).transpose(0, 2)])
    expected = traced.compute()
    strides = _result(traced).stride()
    traced.run(BucketAllreduce())
    assert _result(traced).stride() == strides
    assert_same(module.compute(traced), expected, rtol=2**-7)


def test_cuda_graphs_leave_out_what_is_sent(module: Module) -> None:
    traced = trace(backward(module), [f32(2, 4), f32(3)])
    assert get_first_incompatible_cudagraph_node(traced.gm) is traced.find(AVERAGE)[0]
    traced.run(BucketAllreduce())
    assert get_first_incompatible_cudagraph_node(traced.gm) is traced.only(SEND)
    receive: Any = traced.only(RECEIVE).target
    assert torch.Tag.cudagraph_unsafe in receive.tags


def test_disabled_by_name(module: Module) -> None:
    check_disabled_by_name(BucketAllreduce(), trace(backward(module), [f32(2, 4), f32(3)]))


@pytest.mark.parametrize(("updates", "read_as"), [({}, "f32"), ({"update": [0, 1, 2]}, "bf16")])
def test_measure_says_where_buckets_start_and_are_waited_for_and_what_comes_out(
    module: Module,
    monkeypatch: pytest.MonkeyPatch,
    updates: dict[str, list[int]],
    read_as: str,
) -> None:
    def function(x: Tensor) -> list[Tensor]:
        grads = [torch.ops.aten.mul(x, float(factor)) for factor in range(2, 5)]
        return [module.mean(grad, str(index)) for index, grad in enumerate(grads)]

    monkeypatch.setattr(ModuleSync, "capacities", (50, 50))
    traced = trace(function, [f32(16)])
    traced.graph.output_node().meta[gradients._PRIVATE] = frozenset({0, 1, 2})
    traced.ctx.updates_read = updates
    traced.run(BucketAllreduce())
    found, order = measure_buckets(traced.graph), list(traced.graph.nodes)
    assert len(found) == 3
    assert [order[item.start] for item in found] == traced.find(SEND)
    assert [order[item.wait] for item in found] == traced.find(RECEIVE)
    assert {item.num_nodes for item in found} == {len(order)}
    assert {format_dtype(item.read_as) for item in found} == {read_as}
