"""Cut a region where nothing differentiable crosses, so that each part has a backward of its own.

A compiled graph holds one backward for all that leaves it. But eager goes back through one value
and later through another (the losses of the two nets of a GAN) as long as their histories have
nothing in common. Such histories are compiled apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from mpcompile.capture import dynamo_api
from mpcompile.capture.carried_backward import has_history
from mpcompile.capture.program import build_program
from mpcompile.capture.regions import compile_region
from mpcompile.capture.segments import (
    AUTOCAST,
    SET_GRAD_MODE,
    Segment,
    build_segment,
)
from mpcompile.capture.session import Session
from mpcompile.lowering import Compiled
from mpcompile.pass_base import Buckets


def compile_apart(
    gm: GraphModule, given: Mapping[Node, Any], session: Session, buckets: Buckets
) -> Compiled:
    """Compile the region ``gm``, in parts if it holds histories that have nothing in common.

    ``given`` holds its inputs, and what stands for some of its values. What it sends to other ranks
    is added to ``buckets``.

    Raises:
        CaptureError: an input cannot be handled.
        PassError: a pass cannot rewrite the graph.
    """
    parts = _parts(gm) if session.captures_whole() else []
    if len(parts) < 2:
        inputs = [given[node] for node in gm.graph.find_nodes(op="placeholder")]
        return compile_region(gm, inputs, session, buckets=buckets)
    last: Any = parts[-1].gm
    last.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    compiled = [compile_region(part.gm, part.example_values(given), session) for part in parts]
    return dynamo_api.without_dynamo(build_program(gm, parts, compiled, lambda: None))


def _parts(gm: GraphModule) -> list[Segment]:
    """Return the parts of ``gm`` in order; none if it is one."""
    leaving = {n for n in gm.graph.output_node().all_input_nodes if has_history(n)}
    leaving -= set(gm.graph.find_nodes(op="placeholder"))
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(leaving) < 2 or is_distributed() or any(map(_opens_a_level, nodes)):
        return []
    mode = torch.is_grad_enabled()
    parts, start = [], 0
    for end in _cuts(nodes, leaving):
        block = nodes[start:end]
        before = {a for node in block for a in node.all_input_nodes} & set(nodes[:start])
        cut = set(filter(_requires_grad, before))
        parts.append(build_segment(gm, block, (mode, mode), set(nodes), cut))
        start = end
    return parts


def is_distributed() -> bool:
    """Whether ranks train together: DDP's reducer counts on one backward a graph."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _cuts(nodes: Sequence[Node], leaving: set[Node]) -> Iterator[int]:
    """Yield where the parts end; each holds at least one of ``leaving``."""
    positions = {node: index for index, node in enumerate(nodes)}
    reach = 0  # the last differentiable use of what was met so far
    depth, holds, left = 0, False, len(leaving)
    mode = ambient = torch.is_grad_enabled()
    for index, node in enumerate(nodes):
        if node.target is SET_GRAD_MODE:
            mode = bool(node.args[0])
        depth += (node.target is AUTOCAST[0]) - (node.target is AUTOCAST[1])
        uses = (positions.get(user, 0) for user in node.users if _stays_with(node, user))
        reach = max(reach, *uses, 0)
        left -= node in leaving
        holds |= node in leaving
        if holds and left and depth == 0 and mode == ambient and reach <= index:
            yield index + 1
            holds = False
    yield len(nodes)


def _requires_grad(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad


def _stays_with(node: Node, user: Node) -> bool:
    """Whether ``user`` is to be in the part of ``node``: no history crosses, nor several values."""
    if isinstance(node.meta.get("example_value"), tuple | list):
        return True
    return _requires_grad(node) and _differentiates(user)


def _differentiates(user: Node) -> bool:
    """Whether the history of what ``user`` reads may go on in its result, or in what it writes."""
    value = user.meta.get("example_value")
    tensors = [item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)]
    return value is None or any(tensor.requires_grad for tensor in tensors)


def _opens_a_level(node: Node) -> bool:
    """Whether ``node`` enters or leaves a transform or a mode whose nodes must stay together."""
    name = getattr(node.target, "__name__", "")
    return any(part in name for part in ("nesting", "inference_mode", "dual_level"))
