"""Rules that look at a node and not only at its operands: arguments, shapes, masks, reductions.

Each takes the extractor's view of the graph, the node and the dtype of its result, and returns an
expression, or None where the node has to stay an ATen call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from mpcompile.codegen import aten_rules as rules
from mpcompile.codegen.expr import Expr, apply, cast, constant, reduce, scalar, select
from mpcompile.codegen.values import NUM_ELEMENTS, Value, compute_dtype, convert

aten = torch.ops.aten


class Operands(Protocol):
    """What a rule asks of the extractor. ``shapes`` are the parameters', by owner."""

    shapes: Sequence[tuple[int, ...]]

    @property
    def values(self) -> Mapping[Node, Value]:
        """The value of each node."""

    def tensor_dtype(self, node: Node) -> str:
        """Return the dtype name of the tensor that ``node`` makes."""

    def operand(self, arg: Any) -> Value:
        """Return what ``arg``, a node or a literal, stands for."""

    def number_of(self, arg: Any, dtype: str) -> Expr:
        """Return ``arg`` as ``dtype``."""


def plain(x: Operands, node: Node, dtype: str) -> Expr | None:
    """Operands and result in one dtype."""
    at = compute_dtype(dtype)
    optional = rules.OPTIONAL.get(node.target, {})
    if set(node.kwargs) - set(optional):
        return None
    args = [x.number_of(arg, at) for arg in node.args]
    names = list(optional)[len(args) - _arity(node) :] if optional else []
    args += [x.number_of(node.kwargs.get(name, optional[name]), at) for name in names]
    return convert(rules.POINTWISE[node.target](*args), dtype)


def _arity(node: Node) -> int:
    """Return how many operands come before the optional ones."""
    return 3 if node.target in (aten.addcmul.default, aten.addcdiv.default) else 2


def comparison(x: Operands, node: Node, dtype: str) -> Expr:
    """A bool, compared in the dtype of the first operand."""
    first = node.args[0]
    assert isinstance(first, Node)
    at = compute_dtype(x.tensor_dtype(first))
    other = x.operand(node.args[1])
    if at == "i64" and other.expr.dtype == "f64":
        at = "f64"
    name = rules.COMPARISONS[node.target]
    return rules.compare(name)(x.number_of(first, at), convert(other.expr, at))


def same(x: Operands, node: Node, dtype: str) -> Expr:
    """The first operand, converted."""
    return x.number_of(node.args[0], dtype)


def _copy(x: Operands, node: Node, dtype: str) -> Expr:
    return x.number_of(node.args[1], dtype)


def _full(x: Operands, node: Node, dtype: str) -> Expr | None:
    size = node.args[0]
    if isinstance(size, (list, tuple)) and tuple(size) not in x.shapes and not is_single(size):
        return None
    return x.number_of(node.args[1], dtype)


def is_single(shape: Sequence[Any]) -> bool:
    """Whether a tensor of ``shape`` has one element."""
    return all(size == 1 for size in shape)


def _filled(value: float) -> Any:
    def rule(x: Operands, node: Node, dtype: str) -> Expr | None:
        return convert(constant(value, "f64"), dtype) if is_single(node.meta["val"].shape) else None

    return rule


def _like(value: float) -> Any:
    return lambda x, node, dtype: convert(constant(value, "f64"), dtype)


def _where(x: Operands, node: Node, dtype: str) -> Expr:
    condition, yes, no = node.args
    return select(x.number_of(condition, "bool"), x.number_of(yes, dtype), x.number_of(no, dtype))


def _clamp(x: Operands, node: Node, dtype: str) -> Expr:
    at = compute_dtype(dtype)
    bounds = [*node.args[1:], None, None][:2]
    bounds = [node.kwargs.get(k, b) for k, b in zip(("min", "max"), bounds, strict=True)]
    low, high = (None if b is None else x.number_of(b, at) for b in bounds)
    return convert(rules.clamp(x.number_of(node.args[0], at), low, high), dtype)


def _index_put(x: Operands, node: Node, dtype: str) -> Expr | None:
    """A masked write of one value."""
    base, indices, values, *_ = node.args
    if (
        not isinstance(indices, (list, tuple))
        or len(indices) != 1
        or not isinstance(indices[0], Node)
    ):
        return None
    mask, value = x.values[indices[0]], x.operand(values)
    if mask.expr.dtype != "bool" or value.shape not in ((), None):
        return None
    return select(mask.expr, convert(value.expr, dtype), x.number_of(base, dtype))


def _masked_fill(x: Operands, node: Node, dtype: str) -> Expr:
    base, mask, value = node.args
    return select(x.number_of(mask, "bool"), x.number_of(value, dtype), x.number_of(base, dtype))


def _logical(name: str) -> Any:
    return lambda x, node, dtype: rules.logical(name)(*(x.number_of(a, "bool") for a in node.args))


def _isnan(x: Operands, node: Node, dtype: str) -> Expr:
    value = x.operand(node.args[0]).expr
    value = cast(value, compute_dtype(value.dtype))
    return apply("ne", value, value, dtype="bool")


def _view(x: Operands, node: Node, dtype: str) -> Expr | None:
    source = x.operand(node.args[0])
    same = source.is_uniform or source.shape == tuple(node.meta["val"].shape)
    return convert(source.expr, dtype) if same else None


POINTWISE: dict[object, Any] = {
    aten.copy.default: _copy,
    aten._to_copy.default: same,
    aten.full.default: _full,
    aten.scalar_tensor.default: same,
    aten.full_like.default: lambda x, node, dtype: x.number_of(node.args[1], dtype),
    aten.fill.Scalar: _copy,
    aten.fill.Tensor: _copy,
    aten.zeros_like.default: _like(0.0),
    aten.ones_like.default: _like(1.0),
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.index_put.default: _index_put,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.logical_and.default: _logical("and"),
    aten.logical_or.default: _logical("or"),
    aten.logical_not.default: _logical("not"),
    aten.bitwise_and.Tensor: _logical("and"),
    aten.bitwise_or.Tensor: _logical("or"),
    aten.bitwise_not.default: _logical("not"),
    aten.isnan.default: _isnan,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.zeros.default: _filled(0.0),
    aten.ones.default: _filled(1.0),
}


def pointwise_rule(target: object) -> Any:
    """Return the rule for operation ``target`` if it works on each element by itself."""
    if target in rules.POINTWISE:
        return plain
    if target in rules.COMPARISONS:
        return comparison
    return same if target in rules.SAME_VALUE else POINTWISE.get(target)


def _norm(x: Operands, node: Node, element: Expr) -> Expr | None:
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    if len(node.args) > 2 and node.args[2]:
        return None
    if order in (2, 2.0):
        return apply("sqrt", reduce("sum", rules.mul(element, element), "f64"), dtype="f64")
    magnitude = apply("abs", element, dtype="f64")
    if order in (1, 1.0):
        return reduce("sum", magnitude, "f64")
    return reduce("max", magnitude, "f64") if order == math.inf else None


def _sum(x: Operands, node: Node, element: Expr) -> Expr | None:
    return reduce("sum", element, "f64") if len(node.args) == 1 else None


def _mean(x: Operands, node: Node, element: Expr) -> Expr | None:
    source = node.args[0]
    assert isinstance(source, Node)
    count = cast(scalar(f"{x.values[source].owner}:{NUM_ELEMENTS}", "i64"), "f64")
    return rules.div(reduce("sum", element, "f64"), count) if len(node.args) == 1 else None


REDUCTIONS: dict[object, Any] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
}
