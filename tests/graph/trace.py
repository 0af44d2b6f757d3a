"""Graphs for tests: traced by hand, or as the backend meets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.capture.graph_inputs import input_roles
from mpcompile.graph import nodes
from mpcompile.graph.roles import Roles, find_roles
from mpcompile.lowering import Compiled, eager


def trace(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """Trace ``function`` to ATen on fake tensors."""
    gm: GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    return gm


@dataclass
class Recorder:
    """Stands where the passes stand: keeps each joint or inference graph and its roles."""

    graphs: list[Graph] = field(default_factory=list)
    roles: list[Roles] = field(default_factory=list)
    inputs: tuple[Any, ...] = ()

    def rewrite(self, gm: GraphModule) -> None:
        self.graphs.append(gm.graph)
        self.roles.append(find_roles(gm.graph, self.inputs))

    def observe(self, gm: GraphModule, is_backward: bool) -> None:
        pass

    def cache_key(self) -> str:
        return ""

    def cache_token(self) -> str:
        return ""

    def functions(self) -> Sequence[str]:
        return ()

    def keeps_order(self) -> bool:
        return False

    def is_active(self) -> bool:
        return False


def record(step: Callable[..., Any], *args: Any) -> Recorder:
    """Run ``step`` compiled with nothing rewritten; return the graphs that passes would get."""
    recorder = Recorder()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        recorder.inputs = input_roles(gm)
        return eager.lower(gm, inputs, recorder)

    torch.compile(step, backend=backend)(*args)
    return recorder


def find(graph: Graph, op: str) -> list[Node]:
    """Return the nodes of ``graph`` that call ``op``, ``aten.mm`` say."""
    return [
        node for node in graph.nodes if node.op == "call_function" and nodes.op_name(node) == op
    ]
