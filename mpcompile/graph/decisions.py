"""Precision decisions on nodes: where they are kept, and what they mean for inputs and results."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from mpcompile.graph import nodes
from mpcompile.precision import Decision, Entry, Precision, Rule

_KEY = "mpcompile_precision"


def get(node: Node) -> Decision | None:
    """Return the decision written on ``node``, or None."""
    return node.meta.get(_KEY)


def put(node: Node, decision: Decision) -> None:
    """Write the decision of ``node``."""
    node.meta[_KEY] = decision


def is_pointwise(node: Node) -> bool:
    """Whether type promotion lets a 0-dimensional fp32 input stand beside 16-bit ones."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def cast_inputs(node: Node, entry: Entry) -> list[Node]:
    """Return the inputs that a 16-bit kernel of ``node`` takes in 16 bits, repeats left out.

    A norm's kernel takes its data so, in backward behind the gradient, and the rest in fp32.
    """
    num_data = 2 if nodes.op_name(node).endswith("_backward") else 1
    num_narrow = num_data if entry.rule is Rule.MIXED else None
    inputs = dict.fromkeys(nodes.input_nodes(node)[:num_narrow])
    beside = is_pointwise(node) and not all(is_number(arg) for arg in inputs)
    return [arg for arg in inputs if not (beside and is_number(arg)) and not is_statistic(arg)]


def is_number(node: Node) -> bool:
    """Whether ``node`` has no say in the dtype of others: a 0-dimensional or an empty tensor."""
    val = nodes.value(node)
    return isinstance(val, Tensor) and (val.dim() == 0 or _is_empty(val))


def _is_empty(val: Tensor) -> bool:
    """Whether a size is known to be 0; symbols are not asked, which would guard on them."""
    return any(isinstance(size, int) and size == 0 for size in val.shape)


def is_statistic(node: Node) -> bool:
    """Whether ``node`` is an fp32 result of an op that computes in 16 bits.

    Such are attention's logsumexp and the statistics of a norm; the backward kernel wants them so.
    """
    source = node.args[0] if nodes.is_getitem(node) else None
    if not isinstance(source, Node):
        return False
    whole, part = get(source), get(node)
    computes_half = whole is not None and whole.precision.computes_half
    return computes_half and part is not None and not part.precision.stores_half


def keep_statistics(node: Node, found: Any) -> Any:
    """Correct the results of a norm on 16-bit data with fp32 weights: its statistics are fp32.

    So are those of the CPU kernels, whose fake versions say 16-bit (torch 2.11 to 2.14).
    """
    decision = get(node)
    computes_half = decision is not None and decision.precision.computes_half
    if not computes_half or "norm" not in nodes.op_name(node) or not isinstance(found, tuple):
        return found
    wide = [val.float() if isinstance(val, Tensor) else val for val in found[1:]]
    return (found[0], *wide)


def half_results(
    node: Node, precision: Precision, half: torch.dtype, entry: Entry
) -> frozenset[int]:
    """Return which results of ``node`` are 16-bit under ``precision`` (0 for a single one).

    Empty if none is, or if the op refuses such inputs.
    """
    results = nodes.value(node)
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    floats = frozenset(
        i for i, val in enumerate(flat) if isinstance(val, Tensor) and val.dtype is torch.float32
    )
    if precision is Precision.FP32:
        return frozenset()
    if entry.rule is Rule.MIXED:
        return floats & {0}
    if precision is Precision.FP32_HALF:
        return floats
    if nodes.is_cast(node) or entry.rule is Rule.MOVE or nodes.has_unbacked_sizes(node):
        return floats
    return _trial(node, half, set(cast_inputs(node, entry)))


def _trial(node: Node, half: torch.dtype, casts: set[Node]) -> frozenset[int]:
    """Run the op on fake inputs, those in ``casts`` as 16-bit ones, and look at the results."""
    mode = nodes.fake_mode(node.graph)
    assert mode is not None

    def operand(arg: Node) -> Any:
        val = nodes.value(arg)
        narrow = arg in casts and isinstance(val, Tensor) and val.dtype is torch.float32
        return (
            torch.empty_strided(val.shape, val.stride(), dtype=half, device=val.device)
            if narrow
            else val
        )

    with mode:
        args, kwargs = pytree.tree_map_only(Node, operand, (node.args, node.kwargs))
        try:
            found = cast(Any, node.target)(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return frozenset()
    flat = list(found) if isinstance(found, (tuple, list)) else [found]
    return frozenset(
        i for i, val in enumerate(flat) if isinstance(val, Tensor) and val.dtype is half
    )
