"""Find the node that makes the first Inf or NaN: run a graph node by node and look at each result.

Looking waits for the device, so this is for ``explain``, never for a step in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from mpcompile.graph import nodes
from mpcompile.graph.printer import format_node
from mpcompile.inspection.report import OverflowRecord


class _Watching(Interpreter):
    """Runs a graph and reports the first node that gives what is not finite for finite inputs."""

    def __init__(self, gm: GraphModule, report: Callable[[Node], None]) -> None:
        super().__init__(gm)
        self._report: Callable[[Node], None] | None = report

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self._report is not None and n.op in ("placeholder", "call_function"):
            read = [self.env[arg] for arg in n.all_input_nodes if arg in self.env]
            if not _is_finite(result) and _is_finite(read) and not _asks_for_it(n):
                self._report(n)
                self._report = None
        return result


def _is_finite(values: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point() and t.numel())


def _asks_for_it(node: Node) -> bool:
    """Whether the op was given an infinite number, as a mask of -inf is, or makes no values."""
    numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    infinite = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in numbers)
    return infinite or "empty" in nodes.op_name(node)


def watched(
    gm: GraphModule, region: int, is_backward: bool, found: Callable[[OverflowRecord], None]
) -> Callable[..., Any]:
    """Return what runs ``gm`` and calls ``found`` with its first overflow."""

    def report(node: Node) -> None:
        found(
            OverflowRecord(
                region=region,
                node=node.name,
                text=format_node(node),
                line=nodes.user_line(node),
                is_backward=is_backward,
            )
        )

    def run(*args: Any) -> Any:
        with torch.no_grad():
            return _Watching(gm, report).run(*args)

    return run
