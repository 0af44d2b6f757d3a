"""From the ATen graph of a traced optimizer step to expressions.

Nothing here knows an optimizer: each node becomes an expression of the leaves it reads. Tensors
shaped like the parameter become elementwise expressions; 0-dim tensors and Python numbers become
uniform ones, in the dtype eager computes them in; full reductions join the two. Uniform values of
several parameters may meet; elements of several may not. What is left (a matrix product, a row
mean) stays an ATen call on whole tensors, between two phases of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mpcompile.codegen import aten_nodes as nodes
from mpcompile.codegen import aten_rules as rules
from mpcompile.codegen import vectors
from mpcompile.codegen.expr import Expr, constant, load, scalar
from mpcompile.codegen.values import (
    DTYPE_NAMES,
    NOBODY,
    SEVERAL,
    Call,
    Extracted,
    Leaf,
    Value,
    convert,
)
from mpcompile.errors import CodegenError

aten = torch.ops.aten
_WITHOUT_VALUE = (
    aten.copy_.default,  # what functionalize appends; the outputs say the same
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


class Extractor:
    """One walk over one graph. ``shapes`` gives the parameter shape of each owner."""

    def __init__(self, leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]]) -> None:
        self.leaves, self.shapes = leaves, shapes
        self.values: dict[Node, Value] = {}
        self.result = Extracted()
        self._placeholders = 0

    def run(self, gm: GraphModule) -> Extracted:
        """Return the outputs of ``gm`` as values.

        Raises:
            CodegenError: the update of one tensor reads another, or a node has no meaning here.
        """
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(gm, node)
            elif node.op == "output":
                flat = torch.utils._pytree.tree_leaves(node.args[0])
                self.result.outputs = [self.operand(arg) for arg in flat]
            elif node.target not in _WITHOUT_VALUE:
                self.values[node] = self._call(node)
        return self.result

    def _placeholder(self, node: Node) -> Value:
        leaf = self.leaves[self._placeholders]
        self._placeholders += 1
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return Value(scalar(leaf.name, _number_dtype(val)), None, leaf.owner)
        dtype, shape = self.tensor_dtype(node), tuple(val.shape)
        kind = scalar if shape == () else load
        return Value(kind(leaf.name, dtype), shape, leaf.owner)

    def _attribute(self, gm: GraphModule, node: Node) -> Value:
        """Return a tensor made from a literal; larger ones are not literals."""
        tensor = getattr(gm, str(node.target))
        is_number = isinstance(tensor, torch.Tensor) and tensor.numel() == 1
        if not is_number or tensor.dtype not in DTYPE_NAMES:
            raise CodegenError(f"fuse-updates: {node.format_node()} is a constant tensor.")
        value = constant(tensor.item(), DTYPE_NAMES[tensor.dtype])
        return Value(value, tuple(tensor.shape), NOBODY)

    def tensor_dtype(self, node: Node) -> str:
        """Return the dtype name of the tensor that ``node`` makes."""
        dtype = node.meta["val"].dtype
        if dtype not in DTYPE_NAMES:
            raise CodegenError(
                f"fuse-updates: {node.format_node()} is {dtype}, which kernels do not compute in."
            )
        return DTYPE_NAMES[dtype]

    def operand(self, arg: Any) -> Value:
        """Return what ``arg``, a node or a literal, stands for."""
        if isinstance(arg, Node):
            return self.values[arg]
        if isinstance(arg, bool):
            return Value(constant(arg, "bool"), None, NOBODY)
        if isinstance(arg, int):
            return Value(constant(arg, "i64"), None, NOBODY)
        if isinstance(arg, float):
            return Value(constant(arg, "f64"), None, NOBODY)
        raise CodegenError(f"fuse-updates: an operand is {arg!r}, which is not a number.")

    def _call(self, node: Node) -> Value:
        val = node.meta.get("val")
        if node.target in rules.NUMBERS and not isinstance(val, torch.Tensor):
            args = [self.operand(arg) for arg in node.args]
            expr = rules.number(
                rules.NUMBERS[node.target], [a.expr for a in args], _number_dtype(val)
            )
            return Value(expr, None, self._owner(node, args))
        if node.target is aten._local_scalar_dense.default:
            source = self.operand(node.args[0])
            expr = convert(source.expr, _number_dtype(val))
            if not source.is_uniform:
                raise CodegenError(f"fuse-updates: {node.format_node()} reads one element.")
            return Value(expr, None, source.owner)
        if isinstance(val, torch.Tensor):
            value = vectors.of(self, node) or self._pointwise(node) or self._reduction(node)
            return value if value is not None else self._opaque(node)
        return self._opaque(node)

    def _owner(self, node: Node, args: Sequence[Value]) -> int:
        """Return whose the result is; uniform values of several parameters may meet."""
        found = {arg.owner for arg in args}
        owners = found - {NOBODY, SEVERAL}
        if all(arg.is_uniform or arg.items for arg in args):
            return SEVERAL if len(owners) > 1 or SEVERAL in found else max(owners, default=NOBODY)
        if len(owners) > 1:
            raise CodegenError(
                f"fuse-updates: {node.format_node()} reads elements of two parameters; kernels "
                "couple parameters through sums and maxima over all of them only."
            )
        return max(owners, default=NOBODY)

    def _is_element(self, value: Value, owner: int) -> bool:
        if value.items:
            return False
        return (owner >= 0 and value.shape == self.shapes[owner]) or value.is_uniform

    def _pointwise(self, node: Node) -> Value | None:
        """Return ``node`` as an expression of its operands' elements, if it is one."""
        expr_of = nodes.pointwise_rule(node.target)
        if expr_of is None:
            return None
        reads = [self.values[arg] for arg in node.all_input_nodes]
        owner, shape = self._owner(node, reads), tuple(node.meta["val"].shape)
        if not all(self._is_element(value, owner) for value in reads):
            return None
        expr = expr_of(self, node, self.tensor_dtype(node))
        if expr is None:
            return None
        value = Value(expr, shape, owner)
        return value if self._is_element(value, owner) else None

    def _reduction(self, node: Node) -> Value | None:
        """Return a reduction of all elements, accumulated in f64."""
        if node.meta["val"].shape != () or not node.args or not isinstance(node.args[0], Node):
            return None
        source = self.values[node.args[0]]
        if source.is_uniform and nodes.is_single(source.shape or ()):
            return vectors.reduced(self, node, (source.expr,), self.tensor_dtype(node))
        has_elements = source.owner >= 0 and source.shape == self.shapes[source.owner]
        if node.target not in nodes.REDUCTIONS or not has_elements:
            return None
        expr = nodes.REDUCTIONS[node.target](self, node, convert(source.expr, "f64"))
        if expr is None:
            return None
        return Value(convert(expr, self.tensor_dtype(node)), (), source.owner)

    def _opaque(self, node: Node) -> Value:
        """Keep ``node`` a call; its result is a buffer, or a 0-dim tensor, of its owner."""
        val = node.meta.get("val")
        args, kwargs = torch.utils._pytree.tree_map(
            lambda a: self.operand(a) if isinstance(a, Node) else a, (node.args, node.kwargs)
        )
        reads = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        owner = self._owner(node, reads)
        is_known = owner >= 0 and not any(value.items for value in reads)
        if not isinstance(val, torch.Tensor) or not is_known or not _is_pure(node):
            raise CodegenError(f"fuse-updates: no rule for {node.format_node()}.")
        calls = self.result.calls.setdefault(owner, [])
        name = f"{owner}:temp.{len(calls)}"
        dtype, shape = self.tensor_dtype(node), tuple(val.shape)
        calls.append(
            Call(node.target, tuple(args), tuple(kwargs.items()), name, None, shape, val.dtype)
        )
        return Value((scalar if shape == () else load)(name, dtype), shape, owner)

    def number_of(self, arg: Any, dtype: str) -> Expr:
        """Return an operand as ``dtype``."""
        return convert(self.operand(arg).expr, dtype)


def _is_pure(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable


def _number_dtype(val: Any) -> str:
    if isinstance(val, (bool, torch.SymBool)):
        return "bool"
    return "i64" if isinstance(val, (int, torch.SymInt)) else "f64"
