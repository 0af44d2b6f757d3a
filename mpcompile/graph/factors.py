"""Multiply values of a graph by a factor, and keep the factor out of ops that it does not suit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from mpcompile.graph import nodes
from mpcompile.graph.homogeneous import passes_factor_on


def is_float(node: Node) -> bool:
    """Whether ``node`` gives one floating or complex tensor."""
    val = nodes.value(node)
    return isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())


def multiply(node: Node, factor: Node) -> Node:
    """Insert ``node * factor`` in the dtype and strides of ``node``, behind both."""
    val = cast(Tensor, nodes.value(node))
    aten = torch.ops.aten
    if val.dtype in nodes.HALF_DTYPES:
        wide = cast_to(node, torch.float32)
        product = nodes.call_after(max(wide, factor), aten.mul.Tensor, (wide, factor), {})
        return cast_to(product, val.dtype)
    product = nodes.call_after(max(node, factor), aten.mul.Tensor, (node, factor), {})
    if nodes.has_same_strides(cast(Tensor, nodes.value(product)), val):
        return product
    if nodes.is_dense(node):
        return nodes.insert_strided_copy(product, tuple(val.shape), tuple(val.stride()))
    return _multiply_source(node, product, factor)


def _multiply_source(view: Node, product: Node, factor: Node) -> Node:
    """Multiply what ``view`` repeats or skips elements of, and take the view of that."""
    is_view = isinstance(view.target, OpOverload) and view.target.is_view
    if not is_view or not isinstance(view.args[0], Node):
        return product
    view.graph.erase_node(product)
    below = multiply(view.args[0], factor)
    args = (below, *view.args[1:])
    return nodes.call_after(max(below, view), cast(Any, view.target), args, dict(view.kwargs))


def wrap_inhomogeneous(graph: Graph, inside: set[Node], scale: Node, inverse: Node) -> set[Node]:
    """Have ops that a factor does not pass through read true values, and scale what they give.

    Args:
        graph: the graph; rewritten in place.
        inside: the scaled values; kept up to date.
        scale: the factor.
        inverse: what undoes it.

    Returns:
        The true values that the ops read now.
    """
    true_values = set[Node]()
    for node in list(graph.nodes):
        read = [arg for arg in node.all_input_nodes if arg in inside]
        wrapped = node.op == "call_function" and nodes.is_backward(node) and read
        if not wrapped or node is inverse or nodes.is_getitem(node):
            continue
        if not passes_factor_on(node, inside):
            true_values |= _have_read_true_values(node, read, inside, inverse)
            for result in _results(node):
                _scale_again(result, inside, scale)
    return true_values


def _have_read_true_values(
    node: Node, read: Sequence[Node], inside: set[Node], inverse: Node
) -> set[Node]:
    """Unscale the inputs ``read`` of ``node``, in fp32; return what it reads in their place."""
    true_values = set[Node]()
    for arg in read:
        wide = widened(arg)
        inside.add(wide)
        true = multiply(wide, inverse)
        true_values.add(true)
        nodes.replace_input(node, arg, true)
    for other in node.all_input_nodes:
        if any(nodes.is_half(arg) for arg in read) and nodes.is_half(other):
            nodes.replace_input(node, other, widened(other))
    return true_values


def _results(node: Node) -> list[tuple[Node, torch.dtype]]:
    """Return the floating results of ``node`` with their dtypes, and give it its new value."""
    results = [node] if not nodes.is_tuple(node) else list(node.users)
    known = [
        (result, cast(Tensor, nodes.value(result)).dtype) for result in filter(is_float, results)
    ]
    nodes.refresh_value(node)
    for result in results:
        if result is not node:
            nodes.refresh_value(result)
    return known


def _scale_again(result: tuple[Node, torch.dtype], inside: set[Node], scale: Node) -> None:
    """Let the readers of a true value that was scaled before have it scaled."""
    node, dtype = result
    if node not in inside:
        return
    readers = set(node.users)
    product = multiply(node, scale)
    again = cast_to(product, dtype)
    node.replace_all_uses_with(again, delete_user_cb=readers.__contains__)
    inside.discard(node)
    inside |= {product, again}


def widened(node: Node) -> Node:
    """Return ``node`` in fp32 if it is 16-bit."""
    return cast_to(node, torch.float32) if nodes.is_half(node) else node


def cast_to(node: Node, dtype: torch.dtype) -> Node:
    """Return ``node`` in ``dtype``."""
    if nodes.dtype_of(node) is dtype:
        return node
    return nodes.call_after(node, torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
