"""Reduce gradients between ranks in buckets of 16 bits, each as soon as its last one exists.

A captured step reduces each gradient by itself, as DDP's python reducer does: ``div`` by the number
of ranks, ``all_reduce``, ``wait_tensor``. That is slow but never wrong, and what remains if the
pass is off. Here such reductions are gathered in the order in which their gradients come to be; a
bucket starts behind its last gradient and is waited for in front of the first node that reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed import _functional_collectives  # noqa: F401  # registers the ops
from torch.fx import Graph, GraphModule, Node

from mpcompile.distributed import wire
from mpcompile.distributed.plan import Bucket, wire_of
from mpcompile.errors import PassError
from mpcompile.graph import nodes
from mpcompile.pass_base import GraphPass, PassContext, Stage

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DIV = torch.ops.aten.div.Tensor


@dataclass(frozen=True)
class _Reduction:
    """The mean over ranks of one gradient: ``wait(all_reduce(div(grad, world)))``."""

    grad: Node
    world: int
    group: str
    wait: Node

    @property
    def value(self) -> Tensor:
        return cast(Tensor, nodes.value(self.grad))

    @property
    def num_bytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    @property
    def company(self) -> tuple[object, ...]:
        """Reductions with an equal one may share a bucket."""
        return (self.group, self.world, self.value.dtype, self.value.device)


@dataclass(frozen=True)
class BucketAllreduce(GraphPass):
    """Gather all-reduces of gradients in buckets that are sent in the wire dtype.

    Requires: functional ATen graph with ``meta["val"]`` on every node.
    Ensures: what read a reduced gradient reads the mean over ranks in the dtype it had; each bucket
    carries a ``Bucket`` in ``meta["bucket"]`` of its all-reduce.

    Attributes:
        first_bucket_bytes: size of the first bucket, in bytes of gradients: it starts early.
        bucket_bytes: size of the others.
    """

    first_bucket_bytes: int = 1 << 20
    bucket_bytes: int = 25 << 20

    name: ClassVar[str] = "bucket-allreduce"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = False
    runs_after: ClassVar[tuple[str, ...]] = ("fold-casts",)
    off: ClassVar[str] = "gradients are reduced in float32, in stock DDP's buckets or one by one"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of gradients that share buckets.

        Raises:
            PassError: error feedback was asked for, which a graph has no place for.
        """
        found = list(_match_reductions(gm.graph))
        if found and ctx.config.error_feedback:
            raise PassError(
                f"{self.name}: %{found[0].grad.name} is reduced inside a graph, where nothing is "
                "kept for the next step, so error_feedback cannot be honoured. Use "
                "options={'capture': 'regions'} with it, or leave error_feedback out."
            )
        sent_as = ctx.config.wire_dtype or ctx.config.dtype
        for index, members in enumerate(self._fill(gm.graph, found)):
            _send_together(index, members, sent_as)
        return len(found)

    def _fill(self, graph: Graph, found: Iterable[_Reduction]) -> list[list[_Reduction]]:
        """Return the buckets in the order in which their last gradients come to be."""
        position = {node: index for index, node in enumerate(graph.nodes)}
        full: list[list[_Reduction]] = []
        filling: dict[object, list[_Reduction]] = {}
        capacity = dict.fromkeys((item.company for item in found), self.first_bucket_bytes)
        for item in sorted(found, key=lambda item: position[item.grad]):
            bucket = filling.setdefault(item.company, [])
            bucket.append(item)
            if sum(member.num_bytes for member in bucket) >= capacity[item.company]:
                full.append(filling.pop(item.company))
                capacity[item.company] = self.bucket_bytes
        full += filling.values()
        return sorted(full, key=lambda members: position[members[-1].grad])


def _match_reductions(graph: Graph) -> Iterator[_Reduction]:
    for wait in graph.find_nodes(op="call_function", target=_WAIT):
        found = _match_reduction(wait)
        if found is not None:
            yield found


def _match_reduction(wait: Node) -> _Reduction | None:
    reduce = wait.args[0]
    if not isinstance(reduce, Node) or reduce.target is not _ALL_REDUCE or len(reduce.users) > 1:
        return None
    divide, operation, group = reduce.args
    if not isinstance(divide, Node) or divide.target is not _DIV or len(divide.users) > 1:
        return None
    grad, world = divide.args
    if operation != "sum" or not isinstance(grad, Node) or not isinstance(world, int):
        return None
    val = nodes.value(grad)
    is_plain = isinstance(val, Tensor) and val.is_floating_point() and not val.is_sparse
    if not is_plain or not all(isinstance(size, int) for size in val.shape):
        return None
    return _Reduction(grad, world, str(group), wait)


def _send_together(index: int, members: list[_Reduction], wire_dtype: torch.dtype) -> None:
    """Rewrite the reductions of one bucket."""
    dtype, world = members[0].value.dtype, members[0].world
    bucket = Bucket(
        index=index,
        names=tuple(member.grad.name for member in members),
        sizes=tuple(member.value.numel() for member in members),
        dtype=dtype,
        wire=wire_of(dtype, wire_dtype),
    )
    is_cast = bucket.wire is not dtype
    sent = _flatten_together(members)
    before = 1.0 / (wire.predivision(world) if is_cast else world)
    sent = _then(sent, torch.ops.aten.mul.Tensor, sent, before)
    if is_cast:
        sent = _then(sent, torch.ops.aten._to_copy.default, sent, dtype=bucket.wire)
    reduced = _then(sent, _ALL_REDUCE, sent, "sum", members[0].group)
    reduced.meta["bucket"] = bucket
    reader = _first_reader(members)
    wait = _then(reader.prev, _WAIT, reduced)
    nodes.copy_tags(reduced, wait)
    _hand_out(members, wait, wire.post_factor(world) if is_cast else 1.0)


def _flatten_together(members: list[_Reduction]) -> Node:
    """Lay the gradients one behind the other, right behind the last of them."""
    last = members[-1].grad
    flat = []
    for member in members:
        source = member.grad
        if not member.value.is_contiguous():
            last = source = _then(
                last, torch.ops.aten.clone.default, source, memory_format=torch.contiguous_format
            )
        last = _then(last, torch.ops.aten.view.default, source, [member.value.numel()])
        flat.append(last)
    return _then(last, torch.ops.aten.cat.default, flat)


def _hand_out(members: list[_Reduction], wait: Node, factor: float) -> None:
    """Give each reader of a reduced gradient its part of the bucket."""
    start, last = 0, wait
    for member in members:
        val, end = member.value, start + member.value.numel()
        part = _then(last, torch.ops.aten.slice.Tensor, wait, 0, start, end)
        last = part = _then(part, torch.ops.aten.view.default, part, list(val.shape))
        if nodes.dtype_of(part) is not val.dtype:
            last = part = _then(part, torch.ops.aten._to_copy.default, part, dtype=val.dtype)
        if factor != 1.0:
            last = part = _then(part, torch.ops.aten.mul.Tensor, part, factor)
        member.wait.replace_all_uses_with(part)
        nodes.erase_chain(member.wait, until=member.grad)
        start = end


def _first_reader(members: list[_Reduction]) -> Node:
    readers = {user for member in members for user in member.wait.users}
    for node in members[0].wait.graph.nodes:
        if node in readers:
            return cast(Node, node)
    return members[0].wait.graph.output_node()


def _then(anchor: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    return nodes.call_after(anchor, target, args, kwargs)
