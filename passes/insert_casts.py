"""Make the assignment real: cast inputs to what each node computes in, restore what is visible.

Parameters stay fp32 and are cast where they are used; one cast serves all readers of a value. What
the user can see - outputs, gradients, mutated buffers - gets its fp32 back, as the program says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mpcompile.errors import PassError
from mpcompile.graph import decisions, nodes
from mpcompile.graph.printer import format_node
from mpcompile.graph.roles import is_visible_reader
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.precision import Precision, Rule, Table


@dataclass(frozen=True)
class InsertCasts(GraphPass):
    """Insert the casts that the decisions on the nodes ask for.

    Requires: ``assign-precision`` ran, or no node carries a decision and nothing happens.
    Ensures: every node computes as decided; visible values keep dtype, shape, strides and device;
    integer, complex and float64 values are untouched.
    """

    name: ClassVar[str] = "insert-casts"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = False
    runs_after: ClassVar[tuple[str, ...]] = ("assign-precision",)
    off: ClassVar[str] = "no casts"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of casts inserted or dropped."""
        if not any(
            decision.precision.stores_half
            for node in gm.graph.nodes
            if (decision := decisions.get(node)) is not None
        ):
            return 0
        caster = _Caster(gm.graph, ctx.half, ctx.table)
        for node in list(gm.graph.nodes):
            if node.op == "call_function":
                caster.rewrite(node)
        caster.restore_visible()
        nodes.erase_dead(gm.graph, caster.dropped)
        return caster.num_rewrites


@dataclass
class _Caster:
    """The rewrite, node by node in graph order.

    ``wide`` holds, per reader, the inputs that the program gives it as fp32: only those may be
    narrowed for it, and are widened again where it needs them so.
    """

    graph: Graph
    half: torch.dtype
    table: Table
    wide: dict[Node, set[Node]] = field(default_factory=dict)
    casts: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)
    dropped: list[Node] = field(default_factory=list)
    num_rewrites: int = 0

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            self.wide[node] = {arg for arg in nodes.input_nodes(node) if nodes.is_f32(arg)}

    def rewrite(self, node: Node) -> None:
        """Cast what ``node`` reads, find its new type, and round its result if so decided."""
        decision = decisions.get(node)
        precision = decision.precision if decision else Precision.FP32
        if nodes.is_getitem(node):
            nodes.refresh_value(node)
        elif nodes.is_cast(node) and self._drop_cast(node, precision):
            return
        else:
            self._cast_inputs(node, self._wanted(node, decision is not None, precision))
            if any(self._is_narrowed(node, arg) for arg in nodes.input_nodes(node)):
                self._refresh(node)
        if precision is Precision.FP32_HALF and nodes.is_f32(node):
            self._round_result(node)

    def _is_narrowed(self, reader: Node, arg: Node) -> bool:
        """Whether ``reader`` gets 16 bits where the program gives it fp32."""
        return arg in self.wide[reader] and nodes.dtype_of(arg) is self.half

    def _redirect(self, reader: Node, old: Node, new: Node) -> None:
        """Let ``reader`` read ``new`` for ``old``, as wide or narrow as the program has ``old``."""
        if old in self.wide[reader]:
            self.wide[reader].add(new)
        nodes.replace_input(reader, old, new)

    def _drop_cast(self, node: Node, precision: Precision) -> bool:
        """Drop a cast whose source already has, or may keep, the dtype that it makes."""
        (source,) = nodes.input_nodes(node)
        to_half = nodes.dtype_of(node) is self.half or precision.stores_half
        if nodes.dtype_of(source) is not self.half or not to_half:
            return False
        for reader in list(node.users):
            self._redirect(reader, node, source)
        self.dropped.append(node)
        self.num_rewrites += 1
        return True

    def _wanted(
        self, node: Node, is_decided: bool, precision: Precision
    ) -> dict[Node, torch.dtype]:
        """The dtype in which ``node`` is to read each input that the program gives it as fp32."""
        entry = self.table.entry(nodes.op_name(node))
        inputs = [arg for arg in dict.fromkeys(nodes.input_nodes(node)) if arg in self.wide[node]]
        if is_decided and entry.rule is Rule.MOVE:
            return dict.fromkeys(inputs, self.half if precision.stores_half else torch.float32)
        if not is_decided and self._only_looks(node):
            return {}
        narrow = decisions.cast_inputs(node, entry) if precision.computes_half else []
        return {arg: self.half if arg in narrow else torch.float32 for arg in inputs}

    def _cast_inputs(self, node: Node, wanted: dict[Node, torch.dtype]) -> None:
        for arg, dtype in wanted.items():
            if nodes.dtype_of(arg) is not dtype:
                self._redirect(node, arg, self._cast(arg, dtype, node))

    def _only_looks(self, node: Node) -> bool:
        """A comparison, an argmax: gives no floating value, and reads one floating dtype."""
        read = {nodes.dtype_of(arg) for arg in nodes.input_nodes(node)}
        floats = read & {torch.float32, self.half}
        return len(floats) == 1 and not any(
            val.is_floating_point() or val.is_complex() for val in nodes.tensor_values(node)
        )

    def _cast(self, source: Node, dtype: torch.dtype, user: Node) -> Node:
        key = (source, dtype)
        if key not in self.casts:
            made = nodes.insert_cast(source, dtype, user)
            self.wide[made] = set()
            self.casts[key] = made
            self.num_rewrites += 1
        return self.casts[key]

    def _round_result(self, node: Node) -> None:
        readers = list(node.users)
        rounded = self._cast(node, self.half, node)
        for reader in readers:
            self._redirect(reader, node, rounded)

    def _refresh(self, node: Node) -> None:
        was = nodes.tensor_values(node)
        try:
            nodes.refresh_value(node)
            nodes.set_value(node, decisions.keep_statistics(node, nodes.value(node)))
        except (RuntimeError, TypeError, ValueError) as error:
            raise PassError(
                f"insert-casts: {format_node(node)} ({nodes.user_line(node) or 'no user line'}) "
                f"does not take the inputs that were decided for it: {error}. Keep it in fp32 with "
                f"options={{'keep_fp32': ['{nodes.op_name(node)}']}}."
            ) from error
        now = nodes.tensor_values(node)
        if len(was) == 1 == len(now) and not nodes.has_same_strides(was[0], now[0]):
            self._restride(node, was[0])

    def _restride(self, node: Node, was: Tensor) -> None:
        """Copy ``node`` into the strides it was traced with: later views rely on them."""
        readers = list(node.users)
        copied = nodes.insert_strided_copy(node, tuple(was.shape), tuple(was.stride()))
        self.num_rewrites += 1
        for reader in readers:
            self._redirect(reader, node, copied)

    def restore_visible(self) -> None:
        """Give outputs and written inputs the dtype and the strides that the program gives them."""
        for reader in [node for node in self.graph.nodes if is_visible_reader(node)]:
            for arg in nodes.input_nodes(reader):
                if self._is_narrowed(reader, arg):
                    self._redirect(reader, arg, self._restored(arg, reader))

    def _restored(self, node: Node, reader: Node) -> Node:
        wide = self._cast(node, torch.float32, reader)
        was, now = cast(Tensor, nodes.value(node)), cast(Tensor, nodes.value(wide))
        if not nodes.has_same_strides(was, now):
            wide = nodes.insert_strided_copy(wide, tuple(was.shape), tuple(was.stride()))
            self.wide[wide] = set()
        return wide
