"""``loss(pred[~mask], goal[~mask])``: a mask that is written twice is one in the graph.

How many values a mask selects is a size of which nothing is known, one for each mask. That two of
them are the same cannot be found out later, and a loss of both would break the graph. So where a
mask selects, an earlier one is taken that is made in the same way of the same, if nothing was
written to in between. ``masked_select`` selects as indexing does, for which masks share their size.

Private torch API, seen in 2.11 to 2.14: ``get_fake_value`` of ``variables.builder``, called for
each node that is traced; ``FakeTensor``.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from mpcompile.runtime.stand_ins import is_traced_whole

_NAMES = frozenset(
    """eq ne lt le gt ge isnan isfinite bitwise_not bitwise_and bitwise_or logical_not logical_and
    logical_or bool to unsqueeze expand_as""".split()
)
_OPERATORS = "eq ne lt le gt ge invert and_ or_ xor".split()
_FUNCTIONS = frozenset(
    [getattr(operator, name) for name in _OPERATORS]
    + [getattr(torch, name) for name in _NAMES if callable(getattr(torch, name, None))]
)
"""What makes a mask of others or of values, and does nothing else."""
_WRITES = "mpcompile_writes"
"""Where nodes keep how often what they were made of had been written to."""
_in_memory: weakref.WeakKeyDictionary[Graph, dict[int, list[Tensor]]] = weakref.WeakKeyDictionary()
"""The tensors that the nodes of a graph give, by the memory that they lie in."""


def install() -> None:
    """Take earlier masks in steps that are traced whole."""
    from torch._dynamo.variables import builder

    stock: Any = builder.get_fake_value

    def get_fake_value(node: Node, *args: Any, **kwargs: Any) -> Any:
        if not is_traced_whole():
            return stock(node, *args, **kwargs)
        _select_by_index(node)
        _take_earlier(node)
        found = stock(node, *args, **kwargs)
        _note_memory(node.graph, found)
        return found

    builder.get_fake_value = get_fake_value


def _select_by_index(node: Node) -> None:
    """Make ``values[mask]`` of ``values.masked_select(mask)``, both of one shape."""
    is_select = node.target in ("masked_select", torch.masked_select)
    if not is_select or len(node.args) != 2 or node.kwargs:
        return
    values, mask = map(_value, node.args)
    if values is not None and mask is not None and values.shape == mask.shape:
        node.op, node.target = "call_function", operator.getitem


def _take_earlier(node: Node) -> None:
    if _makes_mask(node):
        node.meta[_WRITES] = [_num_writes(source) for source in node.all_input_nodes]
    elif node.target is operator.getitem and len(node.args) == 2:
        mask = node.args[1]
        if isinstance(mask, Node) and _makes_mask(mask) and _num_writes(mask) == 0:
            earlier = next((n for n in node.graph.nodes if _is_same(n, mask)), mask)
            node.args = (node.args[0], earlier)


def _makes_mask(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _NAMES
    return node.op == "call_function" and node.target in _FUNCTIONS


def _is_same(some: Any, other: Any) -> bool:
    """Whether two nodes, or arguments of nodes, have the same value."""
    if some is other or not isinstance(some, Node) or not isinstance(other, Node):
        return some is other or (type(some) is type(other) and bool(some == other))
    return (
        some.target == other.target
        and some.kwargs == other.kwargs
        and len(some.args) == len(other.args)
        and _WRITES in some.meta
        and some.meta[_WRITES] == other.meta.get(_WRITES)
        and _num_writes(some) == _num_writes(other) == 0
        and all(map(_is_same, some.args, other.args))
    )


def _value(argument: Any) -> Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    return value if isinstance(value, Tensor) else None


def _has_memory(value: Any) -> bool:
    """Whether ``value`` is a plain tensor; one inside ``vmap`` does not say where it lies."""
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def _note_memory(graph: Graph, found: Any) -> None:
    if _has_memory(found):
        known = _in_memory.setdefault(graph, {})
        known.setdefault(_memory_of(found), []).append(found)


def _memory_of(value: Tensor) -> int:
    memory: int = value.untyped_storage()._cdata
    return memory


def _num_writes(node: Node) -> int:
    """Return how often the memory of ``node`` was written to so far, by ``.data`` too.

    More if several tensors in it know of a write; -1 if it is no memory.
    """
    value = _value(node)
    if value is None or not _has_memory(value):
        return -1
    others = _in_memory.get(node.graph, {}).get(_memory_of(value), [])
    tensors = {id(tensor): tensor for tensor in (value, *others)}
    return sum(tensor._version for tensor in tensors.values())
