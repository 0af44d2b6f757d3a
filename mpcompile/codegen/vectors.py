"""Short vectors of uniform values: what ``torch.stack`` makes of the norms of all tensors.

They are kept as the list of their items, so an operation on one becomes an operation on each item,
and a reduction a chain of additions or maxima.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from mpcompile.codegen import aten_nodes as nodes
from mpcompile.codegen.expr import Expr, Reduce, apply, postorder, scalar, substitute
from mpcompile.codegen.values import SEVERAL, Value, convert

aten = torch.ops.aten
_ITEM = scalar("item", "f64")
_FOLDS = {"sum": "add", "max": "max"}


class Operands(nodes.Operands, Protocol):
    """What is known so far; ``values`` is lent the items while a rule looks at them."""

    @property
    def values(self) -> MutableMapping[Node, Value]:
        """The value of each node."""


def of(x: Operands, node: Node) -> Value | None:
    """Return ``node`` as a vector or as what is reduced from one, if it is."""
    dtype, shape = x.tensor_dtype(node), tuple(node.meta["val"].shape)
    if node.target in (aten.stack.default, aten.cat.default):
        return _joined(x, node, dtype, shape)
    found = [arg for arg in node.all_input_nodes if x.values[arg].items]
    if not found:
        return None
    if node.target in nodes.REDUCTIONS:
        return reduced(x, node, x.values[found[0]].items, dtype)
    rule = nodes.pointwise_rule(node.target)
    operands = [x.values[arg] for arg in node.all_input_nodes]
    if rule is None or not all(v.is_uniform or v.shape == shape for v in operands):
        return None
    return _mapped(x, node, found, rule, shape)


def _joined(x: Operands, node: Node, dtype: str, shape: tuple[int, ...]) -> Value | None:
    """Return the vector of the operands of stack or cat, if they are uniform values."""
    parts = node.args[0]
    if len(shape) != 1 or not isinstance(parts, (list, tuple)):
        return None
    items: list[Expr] = []
    for part in parts:
        value = x.operand(part)
        if not value.items and not value.is_uniform:
            return None
        items += [convert(item, dtype) for item in value.items or (value.expr,)]
    return Value(items[0], shape, SEVERAL, tuple(items)) if len(items) == shape[0] else None


def reduced(x: Operands, node: Node, items: Sequence[Expr], dtype: str) -> Value | None:
    """Return a reduction of all items; its rule is that of elements, each sum spelled out."""
    if node.target not in nodes.REDUCTIONS or node.target is aten.mean.default:
        return None
    expr = nodes.REDUCTIONS[node.target](x, node, _ITEM)
    if expr is None or node.meta["val"].shape != ():
        return None
    sums: dict[Expr, Expr] = {}
    for reduction in postorder([expr]):
        if isinstance(reduction, Reduce):
            fold = functools.partial(apply, _FOLDS[reduction.op], dtype="f64")
            leaves = [{_ITEM: convert(item, "f64")} for item in items]
            each = [substitute([reduction.operand], leaf)[0] for leaf in leaves]
            sums[reduction] = functools.reduce(fold, each)
    return Value(convert(substitute([expr], sums)[0], dtype), (), SEVERAL)


def _mapped(
    x: Operands, node: Node, found: Sequence[Node], rule: Any, shape: tuple[int, ...]
) -> Value | None:
    """Return what a rule for elements makes of each item."""
    vectors = {arg: x.values[arg] for arg in found}
    items = []
    for position in range(shape[0]):
        for arg, vector in vectors.items():
            x.values[arg] = Value(vector.items[position], (), SEVERAL)
        items.append(rule(x, node, x.tensor_dtype(node)))
    x.values.update(vectors)
    if any(item is None for item in items):
        return None
    return Value(items[0], shape, SEVERAL, tuple(items))
