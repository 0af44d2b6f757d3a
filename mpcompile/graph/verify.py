"""Check a rewritten graph: well formed, types as stated, nothing visible changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mpcompile.errors import GraphVerifyError
from mpcompile.graph import decisions, nodes
from mpcompile.graph.printer import format_node, format_value
from mpcompile.graph.roles import visible_values


@dataclass(frozen=True)
class Visible:
    """Type of one value that the user can see."""

    name: str
    dtype: torch.dtype
    shape: tuple[object, ...]
    stride: tuple[object, ...]
    device: torch.device


def visible_types(graph: Graph) -> list[Visible]:
    """Record the type of everything visible, to be compared after a rewrite."""
    return [
        Visible(name, val.dtype, tuple(val.shape), tuple(val.stride()), val.device)
        for name, node in visible_values(graph)
        if isinstance(val := nodes.value(node), Tensor) and val.layout is torch.strided
    ]


def verify_graph(graph: Graph, visible: list[Visible], where: str) -> None:
    """Check ``graph`` after the pass called ``where``.

    Args:
        graph: the rewritten graph.
        visible: what ``visible_types`` recorded before.
        where: name of the pass, for the message.

    Raises:
        GraphVerifyError: the graph is malformed, a node's recorded type is not what the op gives,
            or something that the user can see changed its type.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise GraphVerifyError(f"{where}: the rewritten graph is malformed: {error}") from error
    verify_visible(graph, visible, where)
    for node in graph.nodes:
        if node.op == "call_function":
            _verify_type(node, where)


def verify_visible(graph: Graph, visible: list[Visible], where: str) -> None:
    """Check that what the user can see kept dtype, shape, strides and device.

    Raises:
        GraphVerifyError: it did not.
    """
    now = visible_types(graph)
    if len(now) != len(visible):
        raise GraphVerifyError(
            f"{where}: the graph had {len(visible)} visible values and has {len(now)}; the program "
            f"would miss one. Switch the pass off with options={{'disable': ['{where}']}} and "
            "report the graph."
        )
    for was, is_now in zip(visible, now, strict=True):
        if was != is_now:
            raise GraphVerifyError(
                f"{where}: {was.name} was {was.dtype}{list(was.shape)} with strides "
                f"{list(was.stride)} on {was.device} and became {is_now.dtype}{list(is_now.shape)} "
                f"with strides {list(is_now.stride)} on {is_now.device}; the program would see it. "
                f"Switch the pass off with options={{'disable': ['{where}']}} and report the graph."
            )


def _verify_type(node: Node, where: str) -> None:
    """Recompute one node's type on fake tensors and compare it with the recorded one."""
    if not nodes.tensor_values(node) or nodes.has_unbacked_sizes(node):
        return
    try:
        found = decisions.keep_statistics(node, nodes.compute_value(node))
    except (RuntimeError, TypeError, ValueError) as error:
        raise GraphVerifyError(
            f"{where}: {format_node(node)} ({nodes.user_line(node) or 'no user line'}) cannot take "
            f"its inputs {_input_types(node)}: {error}. "
            f"Keep it as traced with options={{'keep_fp32': ['{nodes.op_name(node)}']}}."
        ) from error
    if format_value(found) != format_value(nodes.value(node)):
        raise GraphVerifyError(
            f"{where}: {format_node(node)} is recorded as {format_value(nodes.value(node))} but "
            f"its inputs give {format_value(found)}; the rewrite forgot to refresh it."
        )


def _input_types(node: Node) -> str:
    return ", ".join(format_value(nodes.value(arg)) for arg in nodes.input_nodes(node))
