"""Python numbers that change from call to call stay inputs of a graph.

Dynamo makes an input of a float that has changed: a tensor without dimensions, and ``item()`` where
it is used. AOTAutograd turns what computes with it into ops on tensors, and has Dynamo trace anew,
with the number as a constant, where an op has no such form or where a graph does not use the number
at all, as one segment of several. Each new value is compiled anew then. But any graph can do with
``item()``; so the number is one of which nothing is known, on which no guard can be put, and
AOTAutograd is told that there is nothing to make constant.

Private torch API, seen in 2.11 to 2.14: ``FakeTensor.item_memo``, ``TensorifyState``,
``GuardOnDataDependentSymNode``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.symbolic_convert import TensorifyState
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_ASKED = "should_specialize"

DecidedByValue = GuardOnDataDependentSymNode
"""Raised when code that is traced branches on a number of which nothing is known."""


def free_numbers(graph: Graph) -> dict[Node, str]:
    """Return the inputs of ``graph`` that are such numbers, with the names of their symbols.

    Not one that Dynamo had to look at: it is a constant of the graph already.
    """
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        number: Any = value.item_memo if isinstance(value, FakeTensor) else None
        if isinstance(number, torch.SymFloat) and number.node.expr.is_Symbol:
            found[node] = number.node.expr.name
    return found


def read_once(graph: Graph, numbers: Collection[Node]) -> None:
    """Have ``graph`` ask each of ``numbers`` for its value once: Inductor wants one node for it."""
    for number in numbers:
        first, *others = sorted(number.users)
        for node in others:
            if node.target == first.target == "item":
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def stand_ins(graph: Graph, numbers: Collection[Node]) -> dict[Node, Any]:
    """Return what graphs are traced with for ``numbers`` and for what Python makes of them.

    These are fake tensors and numbers of which nothing is known.
    """
    if not numbers:
        return {}
    found = {node: node.meta["example_value"].detach() for node in numbers}  # without item_memo
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat):
            shape_env: Any = value.node.shape_env
            with shape_env.ignore_fresh_unbacked_symbols():  # a segment's input: no node makes it
                found[node] = shape_env.create_unbacked_symfloat()
    return found


@contextmanager
def staying_free(names: Collection[str]) -> Iterator[None]:
    """Keep AOTAutograd from making constants of the symbols ``names``."""
    stock = vars(TensorifyState)[_ASKED]

    def should_specialize(cls: Any, name: str) -> bool:
        """Whether ``name`` is a constant anyway; if so, AOTAutograd lets it be."""
        return name in names or bool(stock.__get__(None, cls)(name))

    stand_in: Any = classmethod(should_specialize)
    setattr(TensorifyState, _ASKED, stand_in)
    try:
        yield
    finally:
        setattr(TensorifyState, _ASKED, stock)
