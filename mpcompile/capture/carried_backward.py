"""Let a backward after an update go on through values from before it.

Such a step cannot be differentiated as a flat graph, because a segment that has run is not traced
again. So its backward is cut where it crosses: in its own segment it stops at the crossing values,
and autograd carries what arrives there through the segments that made them, which are compiled with
a backward of their own. A GAN that shows one fake to the judge and to the generator is written so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

MODE_OPTIONS = ("retain_graph", "allow_unused")
"""Arguments of ``torch.autograd.grad`` that do not change what is computed."""


@dataclass(frozen=True)
class BackwardCall:
    """The part of a backward that autograd does between segments.

    Attributes:
        node: the call.
        outputs: crossing values, computed in earlier segments.
        inputs: what is differentiated for.
        direct: the gradient of each input by paths that do not cross; its value may be None.
        cotangents: the gradient of each crossing value; its value may be None.
        results: the whole gradient of each input, or None where nothing reads it.
        is_last: whether no other call goes through earlier segments after this one.
    """

    node: Node
    outputs: tuple[Node, ...]
    inputs: tuple[Node, ...]
    direct: tuple[Node, ...]
    cotangents: tuple[Node, ...]
    results: tuple[Node | None, ...]
    is_last: bool

    @property
    def reads(self) -> tuple[Node, ...]:
        """All values of the graph that the call reads."""
        return (*self.outputs, *self.inputs, *self.direct, *self.cotangents)


def carry_backward(*_: Any) -> None:
    """Mark the place of a :class:`BackwardCall` in a graph; never runs."""
    raise AssertionError("a program runs its backward calls itself")


def has_history(node: Node) -> bool:
    """Whether autograd can go back from the value of ``node``."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None


def cut_crossings(graph: Graph, is_call: Callable[[Node], bool]) -> Node | None:
    """Cut each ``autograd.grad`` that goes through values from before an ``is_call`` node.

    Returns:
        One that cannot be cut, because it is to be differentiated again; ``graph`` is of no use
        then.
    """
    block_of: dict[Node, int] = {}
    block = 0
    node: Node
    for node in list(graph.nodes):
        block += is_call(node)
        block_of[node] = block
        if node.op != "call_function" or node.target is not torch.autograd.grad:
            continue
        crossing = _crossing_values(node, block_of)
        if crossing and not _is_plain(node):
            return node
        if crossing:
            _cut(graph, node, crossing)
            block += 1
    return None


def _crossing_values(grad: Node, block_of: dict[Node, int]) -> list[Node]:
    """Return the values from earlier blocks that ``grad`` meets on its way back."""
    found: list[Node] = []
    seen: set[Node] = set()
    waiting = _nodes(grad.args[0])
    while waiting:
        node = waiting.pop()
        if node in seen or not (has_history(node) or _is_bundle(node)):
            continue
        seen.add(node)
        if block_of[node] < block_of[grad]:
            found.append(node)
        else:
            waiting += node.all_input_nodes
    return sorted(found)


def _is_bundle(node: Node) -> bool:
    """Whether ``node`` is several values, of which each has a history or not."""
    return isinstance(node.meta.get("example_value"), (tuple, list))


def _nodes(arg: Any) -> list[Node]:
    return [arg] if isinstance(arg, Node) else [a for a in arg if isinstance(a, Node)]


def _is_plain(grad: Node) -> bool:
    """Whether the results of ``grad`` are only read, one by one."""
    options = {k for k, v in grad.kwargs.items() if v} - {*MODE_OPTIONS, "grad_outputs"}
    users = all(user.target is operator.getitem for user in grad.users)
    return not options and users and len(grad.args) <= 3 and torch.is_grad_enabled()


def _cut(graph: Graph, grad: Node, crossing: Sequence[Node]) -> None:
    """Have ``grad`` stop at the values ``crossing``, and put a marker for the rest behind it."""
    inputs = _nodes(grad.args[1])
    users = list(grad.users)
    totals = list(grad.meta["example_value"])
    grad.args = (grad.args[0], [*inputs, *crossing], *grad.args[2:])
    grad.kwargs = {**grad.kwargs, "allow_unused": True}
    grad.meta["example_value"] = (*totals, *(_like(node) for node in crossing))
    with graph.inserting_after(grad):
        marker = graph.call_function(carry_backward)
    marker.meta = {key: value for key, value in grad.meta.items() if key != "example_value"}
    with graph.inserting_before(marker):
        pieces = [_piece(graph, grad, index) for index in range(len(inputs) + len(crossing))]
    direct, cotangents = pieces[: len(inputs)], pieces[len(inputs) :]
    marker.args = (list(crossing), inputs, direct, cotangents)
    for user in users:
        user.args = (marker, user.args[1])


def _like(node: Node) -> Tensor:
    value: Tensor = node.meta["example_value"].detach()
    return value


def _piece(graph: Graph, grad: Node, index: int) -> Node:
    piece = graph.call_function(operator.getitem, (grad, index))
    piece.meta = {**grad.meta, "example_value": grad.meta["example_value"][index]}
    return piece


def is_carried(node: Node) -> bool:
    """Whether ``node`` is a marker for a backward that autograd carries on."""
    return node.op == "call_function" and node.target is carry_backward


def is_result(node: Node) -> bool:
    """Whether ``node`` takes one gradient from such a marker."""
    return node.target is operator.getitem and is_carried(node.all_input_nodes[0])


def read_carried(node: Node) -> BackwardCall:
    """Return what the marker ``node`` stands for."""
    args: tuple[Any, ...] = node.args
    outputs, inputs, direct, cotangents = (tuple(arg) for arg in args)
    taken = {user.args[1]: user for user in node.users}
    results = tuple(taken.get(index) for index in range(len(inputs)))
    later = iter(reversed(node.graph.find_nodes(op="call_function", target=carry_backward)))
    return BackwardCall(node, outputs, inputs, direct, cotangents, results, next(later) is node)


def run_carried(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    direct: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    is_last: bool,
) -> list[Tensor | None]:
    """Return the gradient of each of ``inputs``, of which ``direct`` is one part.

    Args:
        outputs: crossing values, with what autograd knows of them.
        inputs: what is differentiated for.
        direct: gradients by paths that do not cross; None for zero.
        cotangents: the gradient of each output, of its shape and dtype; None for zero.
        is_last: whether what was saved for backward can go.
    """
    reached = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
    if not reached:
        return list(direct)
    carried = torch.autograd.grad(
        [output for output, _ in reached],
        list(inputs),
        [cotangent for _, cotangent in reached],
        retain_graph=not is_last,
        allow_unused=True,
    )
    crossing = set(map(id, outputs))
    return [
        there if id(value) in crossing else _sum(here, there)
        for value, here, there in zip(inputs, direct, carried, strict=True)
    ]


def _sum(here: Tensor | None, there: Tensor | None) -> Tensor | None:
    if here is None or there is None:
        return there if here is None else here
    return here + there
