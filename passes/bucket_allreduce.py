"""Reduce gradients between ranks in buckets of 16 bits, each as soon as its last one exists.

Capture puts ``mpcompile::average_gradient`` behind each gradient that DistributedDataParallel would
reduce: one all-reduce each, slow but never wrong, and what remains if the pass is off. Here they
are gathered in the order in which their gradients come to be. A bucket starts behind its last
gradient; what reads it comes behind all that does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mpcompile.distributed import graph_ops
from mpcompile.distributed.plan import Bucket, SumOnWire, wire_of
from mpcompile.graph import nodes
from mpcompile.graph.order import put_off
from mpcompile.pass_base import GraphPass, PassContext, Stage

_AVERAGE = torch.ops.mpcompile.average_gradient.default
_SEND = torch.ops.mpcompile.send_bucket.default
_RECEIVE = torch.ops.mpcompile.receive_bucket.default


@dataclass(frozen=True)
class _Reduction:
    """The mean over ranks of one gradient.

    Attributes:
        mean: the node that gives it.
        grad: what is averaged, in 16 bits where it was widened for this only.
        handle: of the module it belongs to.
        name: of the parameter, in the module.
        turn: number of the backward that it comes from.
        update: the update that alone reads the mean and takes it as it is on the wire, or ''.
    """

    mean: Node
    grad: Node
    handle: str
    name: str
    turn: int
    update: str = ""

    @property
    def value(self) -> Tensor:
        return cast(Tensor, nodes.value(self.mean))

    @property
    def num_bytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    @property
    def company(self) -> tuple[object, ...]:
        """Reductions with an equal one may share a bucket."""
        return (self.handle, self.turn, self.update, self.value.dtype, self.value.device)


@dataclass(frozen=True)
class BucketAllreduce(GraphPass):
    """Gather reductions of gradients in buckets that are sent in the wire dtype.

    Requires: functional ATen graph with ``meta["val"]`` on every node.
    Ensures: what read a reduced gradient reads the mean over ranks in the dtype it had, but an
    update that alone reads it gets the sum as it is in 16 bits, and is told which bucket says
    what completes it; each bucket carries a ``Bucket`` in ``meta["bucket"]`` of its send; sends
    stay in their order.
    """

    name: ClassVar[str] = "bucket-allreduce"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = False
    runs_after: ClassVar[tuple[str, ...]] = ("fold-casts",)
    off: ClassVar[str] = "the step goes in regions, and stock DDP reduces its gradients in float32"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of gradients that share buckets."""
        averages = gm.graph.find_nodes(op="call_function", target=_AVERAGE)
        if not averages:
            return 0
        outputs = cast(Sequence[Any], gm.graph.output_node().args[0])
        found = _mark_wired([_read(node) for node in averages], outputs, ctx)
        sums: dict[Node, SumOnWire] = {}
        last: dict[str, Node] = {}
        waits: set[Node] = set()
        for members in _fill(gm.graph, found):
            handle = members[0].handle
            buckets = ctx.buckets.setdefault(handle, [])
            bucket = _describe(len(buckets), members)
            buckets.append(bucket)
            sums |= {item.mean: SumOnWire(handle, bucket.index) for item in members if item.update}
            last[handle], received = _send_together(bucket, members, last.get(handle))
            waits.add(received)
        _tell_updates(outputs, sums, ctx)
        put_off(gm.graph, waits)
        return len(found)


def _read(mean: Node) -> _Reduction:
    grad, handle, name, turn = mean.args
    narrow = _before_widening(cast(Node, grad))
    return _Reduction(mean, narrow, cast(str, handle), cast(str, name), cast(int, turn))


def _before_widening(grad: Node) -> Node:
    """Return the 16-bit value that ``grad`` repeats in float32, or ``grad``."""
    if not nodes.is_cast(grad) or not nodes.is_f32(grad):
        return grad
    (source,) = nodes.input_nodes(grad)
    is_same = nodes.is_half(source) and nodes.has_same_strides(*map(nodes.value, (source, grad)))
    return source if is_same else grad


def _mark_wired(
    found: Sequence[_Reduction], outputs: Sequence[Any], ctx: PassContext
) -> list[_Reduction]:
    """Note who reads a mean, where that is one update that can complete it."""
    reader = {outputs[at]: name for name, read in ctx.updates_read.items() for at in read}
    return [
        replace(item, update=reader[item.mean])
        if item.mean in reader and _may_stay_on_wire(item, outputs)
        else item
        for item in found
    ]


def _may_stay_on_wire(item: _Reduction, outputs: Sequence[Any]) -> bool:
    """Whether nothing but an update reads the mean, and it is narrower on the wire."""
    is_narrowed = nodes.is_f32(item.mean) and graph_ops.find(item.handle).wire.itemsize == 2
    return is_narrowed and outputs.count(item.mean) == len(item.mean.users) == 1


def _tell_updates(outputs: Sequence[Any], sums: Mapping[Node, SumOnWire], ctx: PassContext) -> None:
    """Tell each update which of its gradients it gets as they are on the wire."""
    for name, read in ctx.updates_read.items():
        mine = tuple(sums.get(outputs[at]) for at in read)
        if any(mine):
            ctx.on_wire[name] = mine


def _fill(graph: Graph, found: Iterable[_Reduction]) -> list[list[_Reduction]]:
    """Return the buckets in the order in which their last gradients come to be."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    full: list[list[_Reduction]] = []
    filling: dict[object, list[_Reduction]] = {}
    started: set[object] = set()
    for item in sorted(found, key=lambda item: position[item.grad]):
        bucket = filling.setdefault(item.company, [])
        bucket.append(item)
        first, others = graph_ops.find(item.handle).capacities
        capacity = others if item.company in started else first
        if sum(member.num_bytes for member in bucket) >= capacity:
            full.append(filling.pop(item.company))
            started.add(item.company)
    full += filling.values()
    return sorted(full, key=lambda members: position[members[-1].grad])


def _describe(index: int, members: list[_Reduction]) -> Bucket:
    dtype = members[0].value.dtype
    return Bucket(
        index=index,
        names=tuple(member.name for member in members),
        sizes=tuple(member.value.numel() for member in members),
        dtype=dtype,
        wire=wire_of(dtype, graph_ops.find(members[0].handle).wire),
        turn=members[0].turn,
    )


def _send_together(
    bucket: Bucket, members: list[_Reduction], after: Node | None
) -> tuple[Node, Node]:
    """Rewrite the reductions of one bucket; return the nodes that start it and wait for it.

    The node that starts it reads the one that started the bucket before, ``after``, so that no
    compiler changes their order.
    """
    handle = members[0].handle
    grads = [member.grad for member in members]
    anchor = grads[-1] if after is None else max(grads[-1], after)
    dtype = bucket.wire if members[0].update else bucket.dtype
    sent = _then(anchor, _SEND, handle, bucket.index, grads, dtype, after)
    sent.meta["bucket"] = bucket
    kept = grads if bucket.wire is torch.float16 and bucket.dtype is torch.float32 else []
    received = _then(sent, _RECEIVE, handle, bucket.index, bucket.num_elements, sent, kept)
    nodes.copy_tags(members[0].mean, received)
    _hand_out(members, received)
    return sent, received


def _hand_out(members: list[_Reduction], received: Node) -> None:
    """Give each reader of a reduced gradient its part of the bucket."""
    start, last = 0, received
    for member in members:
        val, end = member.value, start + member.value.numel()
        part = _then(last, torch.ops.aten.slice.Tensor, received, 0, start, end)
        last = _then(part, torch.ops.aten.view.default, part, list(val.shape))
        if not nodes.has_same_strides(cast(Tensor, nodes.value(last)), val):
            last = nodes.insert_strided_copy(last, tuple(val.shape), tuple(val.stride()))
        member.mean.replace_all_uses_with(last)
        widened = cast(Node, member.mean.args[0])
        member.mean.graph.erase_node(member.mean)
        nodes.erase_dead(member.grad.graph, [widened] if widened is not member.grad else [])
        start = end


def _then(anchor: Node, target: Any, *args: Any) -> Node:
    return nodes.call_after(anchor, target, args, {})
