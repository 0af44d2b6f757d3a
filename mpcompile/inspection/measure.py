"""Count what a graph computes and in which dtype: ops, matmul FLOPs, casts, saved bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, TangentAOTInput
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from mpcompile.distributed.record import GraphBucket
from mpcompile.graph import decisions, nodes
from mpcompile.graph.printer import format_dtype

_RECEIVE = "mpcompile.receive_bucket"


@dataclass(frozen=True)
class OpTotals:
    """What a graph computes, by dtype (``bf16``, ``f32``).

    Attributes:
        ops: number of nodes by the dtype of their first tensor result.
        matmul_flops: floating-point operations of matrix products, convolutions and attention by
            the dtype of their operands (the widest of them).
    """

    ops: dict[str, int] = field(default_factory=dict)
    matmul_flops: dict[str, int] = field(default_factory=dict)

    def half_share(self) -> float | None:
        """Share of matmul FLOPs on 16-bit operands, or None if there are none."""
        total = sum(self.matmul_flops.values())
        half = self.matmul_flops.get("bf16", 0) + self.matmul_flops.get("f16", 0)
        return half / total if total else None


@dataclass(frozen=True)
class CastRecord:
    """One cast in a rewritten graph.

    Attributes:
        node: name of the cast.
        source: name of what it casts.
        shape: shape of it, as text.
        dtypes: ``f32 -> bf16``.
        reader: name of a node that reads the result.
        reason: why that node is computed as it is.
        line: the user's line of that node, ``file.py:12``.
    """

    node: str
    source: str
    shape: str
    dtypes: str
    reader: str
    reason: str
    line: str


@dataclass(frozen=True)
class DecisionRecord:
    """The decision on one node.

    Attributes:
        node: its name.
        op: ``aten.mm``.
        precision: ``half``, ``fp32`` or ``fp32->half``.
        reason: why.
        module: dotted path of the module it comes from, or ''.
        line: the user's line, or ''.
    """

    node: str
    op: str
    precision: str
    reason: str
    module: str
    line: str


def measure_buckets(graph: Graph) -> list[GraphBucket]:
    """Return the gradient buckets that ``graph`` sends, with where they start and are awaited."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    return [_measure_bucket(node, position) for node in graph.nodes if "bucket" in node.meta]


def _measure_bucket(sent: Node, position: Mapping[Node, int]) -> GraphBucket:
    (received,) = (user for user in sent.users if nodes.op_name(user) == _RECEIVE)
    return GraphBucket(
        bucket=sent.meta["bucket"],
        start=position[sent],
        wait=position[received],
        num_nodes=len(position),
        read_as=cast(Tensor, nodes.value(received)).dtype,
    )


def measure_ops(graph: Graph) -> OpTotals:
    """Count ops and matmul FLOPs of ``graph`` by dtype."""
    ops: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for node in graph.nodes:
        tensors = nodes.tensor_values(node)
        if node.op != "call_function" or not tensors or nodes.is_getitem(node):
            continue
        ops[format_dtype(tensors[0].dtype)] += 1
        count = _flops(node)
        if count:
            flops[_operand_dtype(node)] += count
    return OpTotals(dict(ops), dict(flops))


def _operand_dtype(node: Node) -> str:
    """The widest dtype among operands of two and more dimensions: biases and statistics aside."""
    inputs = nodes.input_nodes(node)
    if "attention" in nodes.op_name(node):  # query, key, value, with their gradient before them
        inputs = inputs[: 4 if nodes.op_name(node).endswith("_backward") else 3]
    operands = [
        val.dtype
        for arg in inputs
        if (val := cast(Tensor, nodes.value(arg))).dim() >= 2 and val.is_floating_point()
    ]
    return format_dtype(max(operands, key=lambda dtype: dtype.itemsize)) if operands else "none"


def _flops(node: Node) -> int:
    """FLOPs of a matrix product as ``torch.utils.flop_counter`` counts them, else 0."""
    if not isinstance(node.target, OpOverload):
        return 0
    args, kwargs = pytree.tree_map_only(Node, nodes.value, (node.args, node.kwargs))
    like = _COUNTED_LIKE.get(nodes.op_name(node))
    if like is not None:  # the CPU kernel's twin takes these tensors first, in the same order
        packet, num_tensors = like
        args, kwargs = tuple(args[:num_tensors]), {}
    else:
        packet = node.target.overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    return _hint(formula(*args, **kwargs, out_val=nodes.value(node)))


# The registry lacks the CPU kernels: op -> (op that counts the same, leading tensors it needs).
_COUNTED_LIKE = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention,
        3,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
        4,
    ),
}


def _hint(count: Any) -> int:
    if isinstance(count, torch.SymInt):
        return int(count.node.hint or 0)
    return int(count)


def measure_casts(graph: Graph) -> tuple[list[CastRecord], list[DecisionRecord]]:
    """List the casts of a rewritten graph and the decisions on its nodes, in graph order."""
    casts = [_describe_cast(node) for node in graph.nodes if _is_ours(node)]
    return casts, list(_decisions(graph))


def _is_ours(node: Node) -> bool:
    return nodes.is_cast(node) and bool(node.users)


def _describe_cast(node: Node) -> CastRecord:
    (source,) = nodes.input_nodes(node)
    reader = next(iter(node.users))
    decision = decisions.get(reader) or decisions.get(source)
    if reader.op == "output":
        reason = "the program sees it in this dtype"
    else:
        reason = decision.reason if decision else "as written"
    val, given = cast(Tensor, nodes.value(node)), cast(Tensor, nodes.value(source))
    return CastRecord(
        node=node.name,
        source=source.name,
        shape=f"[{','.join(map(str, val.shape))}]",
        dtypes=f"{format_dtype(given.dtype)} -> {format_dtype(val.dtype)}",
        reader=reader.name,
        reason=reason,
        line=nodes.user_line(reader) or nodes.user_line(node),
    )


def _decisions(graph: Graph) -> Iterator[DecisionRecord]:
    for node in graph.nodes:
        decision = decisions.get(node)
        if decision is not None:
            yield DecisionRecord(
                node=node.name,
                op=nodes.op_name(node),
                precision=decision.precision.value,
                reason=decision.reason,
                module=nodes.module_path(node),
                line=nodes.user_line(node),
            )


def measure_saved(backward: Graph) -> dict[str, int]:
    """Bytes by dtype that a backward graph reads from its forward, the user's tensors aside.

    A parameter that backward reads is alive anyway; it is no activation.
    """
    return measure_values(
        node
        for node in backward.find_nodes(op="placeholder")
        if not isinstance(node.meta.get("desc"), (PlainAOTInput, TangentAOTInput))
    )


def measure_values(values: Iterable[Node]) -> dict[str, int]:
    """Bytes of ``values`` by dtype."""
    saved: Counter[str] = Counter()
    for node in values:
        for val in nodes.tensor_values(node):
            saved[format_dtype(val.dtype)] += num_bytes(val)
    return dict(saved)


def num_bytes(val: Tensor) -> int:
    """Bytes of the elements of a fake tensor."""
    return _hint(val.numel()) * val.dtype.itemsize
