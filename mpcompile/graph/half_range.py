"""Which nodes float16 has no room for, as far as ops and constants tell before anything runs.

float16 ends at 65504 and is exact down to 2**-14 only. A mask of -1e9 becomes -Inf (and a row of
it NaN), an epsilon of 1e-8 becomes zero, a square overflows from 256 on. What an activation will
be is not known here; the loss scale meets that by skipping the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from mpcompile.graph import nodes
from mpcompile.precision import Rule, Table

LARGEST = torch.finfo(torch.float16).max
SMALLEST = torch.finfo(torch.float16).smallest_normal
_MOST_ELEMENTS = 1 << 20  # of a constant that is looked at
_PASSING = (Rule.MOVE, Rule.EXACT, Rule.NEUTRAL)
_CONSTANTS = frozenset(
    f"aten.{op}" for op in "full full_like new_full scalar_tensor arange fill".split()
)


def out_of_range(graph: Graph, table: Table) -> dict[Node, str]:
    """Return why each node that float16 has no room for is to be computed in fp32."""
    reasons: dict[Node, str] = {}
    beyond: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            beyond |= {node} if _holds_large(node) else set()
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        reason, is_large = _reason(node, beyond)
        if reason:
            reasons[node] = reason
        name = nodes.op_name(node)
        if is_large and (table.entry(name).rule in _PASSING or name in _CONSTANTS):
            beyond.add(node)
    return reasons


def _reason(node: Node, beyond: set[Node]) -> tuple[str, bool]:
    """Return why, and whether the result holds numbers that float16 does not reach."""
    reads = next((arg for arg in nodes.input_nodes(node) if arg in beyond), None)
    if reads is not None:
        return f"%{reads.name} holds constants beyond float16's 65504", True
    for value in _scalars(node):
        if LARGEST < abs(value) < math.inf:
            return f"constant {value:g} is beyond float16's 65504", True
        if 0 < abs(value) < SMALLEST:
            return f"constant {value:g} vanishes in float16", False
    if _is_square(node):
        return "a square: beyond float16's 65504 from 256 on", False
    return "", False


def _scalars(node: Node) -> Iterator[float]:
    """Yield the numbers that an op computes with; sizes and dimensions are none."""
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_value = "number" in str(argument.type) or str(argument.type) == "Tensor"
        if isinstance(given, (int, float)) and is_value:
            yield float(given)


def _is_square(node: Node) -> bool:
    name = nodes.op_name(node)
    if name == "aten.mul":
        return node.args[0] is node.args[1]
    return name == "aten.square" or (name == "aten.addcmul" and node.args[1] is node.args[2])


def _holds_large(node: Node) -> bool:
    """Whether a constant of the graph holds finite numbers beyond 65504."""
    owner = node.graph.owning_module
    held = getattr(owner, str(node.target), None)
    constant = getattr(held, "constant", held)  # what a fake tensor was made from
    if not isinstance(constant, Tensor) or constant.numel() > _MOST_ELEMENTS:
        return False
    if not constant.is_floating_point() or type(constant) is not Tensor:
        return False
    with unset_fake_temporarily(), _disable_current_modes():
        sizes = constant.abs()
        return bool(((sizes > LARGEST) & sizes.isfinite()).any())
