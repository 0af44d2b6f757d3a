"""Trace small programs as the backend does, run passes on them, and compare what comes out.

``trace_function`` gives the ATen graph of a few ops, ``trace_step`` the joint forward+backward
graph that the lowerings hand to the passes: through Dynamo and AOTAutograd, nothing decomposed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.capture.backward_tags import tag_backward
from mpcompile.capture.graph_inputs import input_roles
from mpcompile.config import Config
from mpcompile.graph import decisions, nodes
from mpcompile.graph.printer import format_graph
from mpcompile.graph.roles import GraphKind, InputRole, Roles, find_roles
from mpcompile.graph.verify import verify_graph, visible_types
from mpcompile.lowering import eager
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.pass_manager import PassManager
from mpcompile.pipeline import build_manager
from mpcompile.precision import Decision, Precision


@dataclass
class Traced:
    """An ATen graph with the context in which passes see it.

    Attributes:
        gm: the graph; passes rewrite it in place.
        ctx: options and roles.
        dynamo: print of Dynamo's graph behind its passes, or '' if there was none.
    """

    gm: GraphModule
    ctx: PassContext
    dynamo: str = ""

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    @property
    def roles(self) -> Roles:
        assert self.ctx.roles is not None
        return self.ctx.roles

    @property
    def text(self) -> str:
        return format_graph(self.graph)

    def run(self, *passes: GraphPass) -> int:
        """Run ``passes``, verify after each, and return what the last one counted."""
        count = 0
        for item in passes:
            visible = visible_types(self.graph)
            count = item.run(self.gm, self.ctx)
            verify_graph(self.graph, visible, item.name)
        self.gm.recompile()
        return count

    def compute(self, seed: int = 0) -> list[Tensor]:
        """Return outputs and inputs of a run on made-up inputs, the same for the same seed."""
        inputs = make_inputs(self.graph, seed)
        torch.manual_seed(seed)
        found = Interpreter(self.gm).run(*inputs, enable_io_processing=False)
        return [leaf for leaf in pytree.tree_leaves((found, inputs)) if isinstance(leaf, Tensor)]

    def find(self, op: str) -> list[Node]:
        """Return the nodes of ``op`` (``aten.mm``), in order."""
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and nodes.op_name(node) == op
        ]

    def only(self, op: str) -> Node:
        (node,) = self.find(op)
        return node

    def forward(self, op: str) -> list[Node]:
        return [node for node in self.find(op) if not nodes.is_backward(node)]

    def backward(self, op: str) -> list[Node]:
        return [node for node in self.find(op) if nodes.is_backward(node)]

    def precisions(self, op: str) -> list[Precision]:
        """Return what was decided for each node of ``op``, in order."""
        return [decision_of(node).precision for node in self.find(op)]

    def precision(self, op: str) -> Precision:
        """Return what was decided for the one forward node of ``op``."""
        (node,) = self.forward(op)
        return decision_of(node).precision

    def reason(self, op: str) -> str:
        (node,) = self.forward(op)
        return decision_of(node).reason

    def casts(self) -> list[Node]:
        return [node for node in self.graph.nodes if nodes.is_cast(node)]


def decision_of(node: Node) -> Decision:
    """Return the decision on ``node``, which must have one."""
    decision = decisions.get(node)
    assert decision is not None, f"%{node.name} carries no decision"
    return decision


def dtypes(found: Sequence[Node]) -> list[torch.dtype | None]:
    """Return the dtype of each node."""
    return [nodes.dtype_of(node) for node in found]


def input_dtypes(node: Node) -> list[torch.dtype | None]:
    """Return the dtype of each tensor input of ``node``."""
    return [nodes.dtype_of(arg) for arg in nodes.input_nodes(node)]


def make_inputs(graph: Graph, seed: int) -> list[Any]:
    """Return real inputs for ``graph``: normal floats, zeros for integers, strides as traced."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Any] = []
    for node in graph.find_nodes(op="placeholder"):
        val = nodes.value(node)
        if not isinstance(val, Tensor):
            made.append(val)
            continue
        real = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        if val.is_floating_point():
            real.copy_(torch.randn(val.shape, generator=generator))
        else:
            real.zero_()
        made.append(real)
    return made


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy ``gm`` with all metadata, so that a compiler may go on with the original."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta.update(gm.graph.output_node().meta)
    return GraphModule(gm, graph)


def trace_function(
    function: Callable[..., Any], inputs: Sequence[Tensor], config: Config | None = None
) -> Traced:
    """Trace a few tensor ops to ATen; parameters among ``inputs`` have the role of one."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    roles = find_roles(gm.graph, ())
    named = {  # make_fx does not say which of its inputs were parameters
        node: InputRole.PARAMETER if isinstance(value, torch.nn.Parameter) else InputRole.DATA
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    roles = replace(roles, inputs=roles.inputs | named)
    return Traced(gm, PassContext(config or Config(), roles=roles))


@dataclass
class _Recorder:
    """Runs Dynamo's passes on each graph of a step and keeps a copy of its ATen form.

    The graphs go on to eager lowering as traced, so a step that trains goes on in fp32.
    """

    config: Config
    manager: PassManager
    traced: list[Traced] = field(default_factory=list)
    roles: tuple[InputRole, ...] = ()
    dynamo: str = ""

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        ctx = PassContext(self.config, region=len(self.traced))
        tag_backward(gm)
        self.roles = input_roles(gm)
        self.manager.run(Stage.DYNAMO, gm, ctx)
        self.dynamo = format_graph(gm.graph)
        return eager.lower(gm, inputs, self)

    def rewrite(self, gm: GraphModule) -> None:
        copied = copy_graph(gm)
        roles = find_roles(copied.graph, self.roles)
        ctx = PassContext(self.config, region=len(self.traced), roles=roles)
        self.traced.append(Traced(copied, ctx, self.dynamo))

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
        return True


def trace_graphs(step: Callable[..., Any], *args: Any, **options: object) -> list[Traced]:
    """Run ``step`` once and return the ATen graph of every region, before any ATen pass.

    ``options`` are those of the backend.
    """
    config = Config.from_options(options, environ={})
    recorder = _Recorder(config, build_manager(config))
    torch.compile(step, backend=recorder)(*args)
    return recorder.traced


def trace_step(step: Callable[..., Any], *args: Any, **options: object) -> Traced:
    """Return the joint graph of ``step``, a function that returns a loss."""
    (traced,) = trace_graphs(step, *args, **options)
    assert traced.roles.kind is GraphKind.TRAINING
    return traced


@dataclass
class DynamoTrace:
    """Dynamo's graph of a program, and real inputs for it."""

    gm: GraphModule
    ctx: PassContext
    inputs: Sequence[Any] = ()

    @property
    def text(self) -> str:
        return format_graph(self.gm.graph)

    def run(self, item: GraphPass) -> int:
        count = item.run(self.gm, self.ctx)
        self.gm.graph.lint()
        self.gm.recompile()
        return count

    def compute(self) -> list[Tensor]:
        found = pytree.tree_leaves(self.gm(*self.inputs))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]


def trace_dynamo(function: Callable[..., Any], *args: Any, **options: object) -> DynamoTrace:
    """Return Dynamo's graph of ``function``, before any pass."""
    found: list[DynamoTrace] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        config = Config.from_options(options, environ={})
        trace = DynamoTrace(copy_graph(gm), PassContext(config))
        found.append(trace)

        def call(*inputs: Any) -> Any:
            trace.inputs = inputs
            return gm.forward(*inputs)

        return call

    torch.compile(function, backend=backend)(*args)
    (trace,) = found
    return trace


def clean(text: str) -> str:
    """Take the indentation off a print that stands in a test."""
    return textwrap.dedent(text).strip()


def check_rewrite(
    item: GraphPass,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    before: str,
    after: str,
    rewrites: int,
    prepare: Sequence[GraphPass] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
) -> None:
    """Check that a pass turns one print into another, counts right and computes the same.

    Args:
        item: the pass.
        function: traced with ``make_fx``.
        inputs: example inputs.
        before: print of the traced graph, behind ``prepare``.
        after: print that the pass is to give; the same text means left alone.
        rewrites: what the pass is to return.
        prepare: passes that run first.
        atol: how far a number may move, 0 for a pass that is exact.
        rtol: the same, relative.
    """
    traced = trace_function(function, inputs)
    traced.run(*prepare)
    assert traced.text == clean(before)
    expected = traced.compute()
    assert traced.run(item) == rewrites
    assert traced.text == clean(after)
    assert_same(traced.compute(), expected, atol=atol, rtol=rtol)


def check_left_alone(item: GraphPass, traced: Traced) -> None:
    """Check that a pass returns 0 and does not touch the print."""
    before = traced.text
    assert traced.run(item) == 0
    assert traced.text == before


def check_disabled_by_name(item: GraphPass, trace: Traced | DynamoTrace) -> None:
    """Check that ``disable`` keeps ``item`` from running where it would have rewritten."""
    config = Config.from_options({"disable": [item.name]}, environ={})
    before = trace.text
    (record,) = PassManager([item], config).run(item.stage, trace.gm, trace.ctx)
    assert (record.name, record.enabled, record.rewrites) == (item.name, False, 0)
    assert trace.text == before
    assert trace.run(item) > 0


def assert_same(
    found: Sequence[Tensor], expected: Sequence[Tensor], *, atol: float = 0.0, rtol: float = 0.0
) -> None:
    """Check that tensors are equal in type, strides and numbers."""
    torch.testing.assert_close(
        list(found), list(expected), atol=atol, rtol=rtol, equal_nan=True, check_stride=True
    )


def f32(*shape: int) -> Tensor:
    return torch.randn(shape)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


def to_half(value: Tensor) -> Tensor:
    """Cast as the passes do it: one op that changes the dtype and nothing else."""
    return cast(Tensor, torch.ops.aten._to_copy.default(value, dtype=torch.bfloat16))


def to_f32(value: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.aten._to_copy.default(value, dtype=torch.float32))
