"""Compile one graph that Dynamo hands over: passes on it, passes on its ATen form, lowering.

What Dynamo hands over of a plain step: forward with loss (its backward comes from AOTAutograd), a
graph that clips, the optimizer's update, and small change such as ``loss.detach()``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import mpcompile
from mpcompile.capture import dynamo_api, graph_inputs
from mpcompile.capture.backward_tags import FUNCTIONS, tag_backward
from mpcompile.capture.overflow import watched
from mpcompile.capture.region_cache import CacheEntry, collect, find_entry, restore
from mpcompile.capture.region_key import IndescribableError, describe
from mpcompile.capture.scaling import UpdateReads, scaled_call, written_state
from mpcompile.capture.session import Session
from mpcompile.graph import gradients, links, nodes
from mpcompile.graph.printer import format_graph
from mpcompile.graph.roles import GraphKind, InputRole, find_roles
from mpcompile.inspection.dump import dump_region
from mpcompile.inspection.measure import (
    measure_buckets,
    measure_casts,
    measure_ops,
    measure_saved,
    measure_values,
)
from mpcompile.inspection.memory import GraphPart, RegionMemory
from mpcompile.inspection.report import RegionReport
from mpcompile.lowering import Compiled, is_cached, lower
from mpcompile.lowering.rematerialise import backward_nodes, saved_values
from mpcompile.lowering.source_hash import source_hash
from mpcompile.pass_base import Buckets, PassContext, Stage


def compile_region(
    gm: GraphModule,
    inputs: Sequence[Any],
    session: Session,
    private: Collection[int] = (),
    reads: UpdateReads | None = None,
    buckets: Buckets | None = None,
) -> Compiled:
    """Compile Dynamo's graph ``gm`` for the step of ``session``.

    Args:
        gm: the graph, or a segment of one.
        inputs: its inputs, fake or real.
        session: whose step it is.
        private: positions of outputs that only the runtime reads.
        reads: which of these each update reads; told which of them stay scaled.
        buckets: what the program sends to other ranks; told what this graph sends.

    Raises:
        CaptureError: an input cannot be handled.
        PassError: a pass cannot rewrite the graph.
    """
    graph_inputs.refuse_unsupported(gm)
    tag_backward(gm)
    graph_inputs.warn_half_parameters(gm)
    roles = graph_inputs.input_roles(gm)
    region = _begin_report(gm, session)
    ctx = _context(session, region.index)
    ctx.input_names = graph_inputs.input_names(gm)
    if ctx.scaled is not None:
        ctx.scaled.input_names = ctx.input_names
    region.add_passes(session.manager.run(Stage.DYNAMO, gm, ctx))
    ctx.updates_read = {} if reads is None else reads.outputs
    ctx.buckets = {} if buckets is None else buckets
    rewriter = RegionRewriter(session, region, roles, ctx, private, sends=_sends(gm))
    rewriter.look_up(gm, inputs)
    compiled = lower(gm, inputs, session.config, rewriter)
    rewriter.finish()
    session.used_overrides |= ctx.used_overrides
    if reads is not None:
        reads.on_wire |= ctx.on_wire
    if ctx.scaled is None:
        return compiled
    if reads is not None:
        reads.scaled |= ctx.scaled.folded
    return scaled_call(compiled, ctx.scaled)


def _sends(gm: GraphModule) -> bool:
    """Whether the graph sends gradients to other ranks."""
    op = torch.ops.mpcompile.average_gradient
    return any(node.target in (op, op.default) for node in gm.graph.nodes)


def _begin_report(gm: GraphModule, session: Session) -> RegionReport:
    found = dynamo_api.break_of(gm)
    region = RegionReport(
        index=len(session.report.regions),
        dynamo_before=format_graph(gm.graph),
        grad_enabled=graph_inputs.computes_with_grad(gm),
        ended_by=found.reason if found else "",
        ended_at=found.line if found else "",
    )
    session.report.regions.append(region)
    return region


def _context(session: Session, region: int) -> PassContext:
    return PassContext(
        config=session.config,
        region=region,
        assigned=session.assigned.get(region, {}),
        scaled=session.loss_scale.add_region() if session.loss_scale else None,
    )


class RegionRewriter:
    """Runs the ATen passes when the lowering has traced the graph, and keeps the books."""

    def __init__(
        self,
        session: Session,
        region: RegionReport,
        input_roles: Sequence[InputRole],
        ctx: PassContext,
        private: Collection[int] = (),
        sends: bool = False,
    ) -> None:
        self._private = private
        self._memory = RegionMemory()
        self._manager = session.manager
        self._dtype = session.config.dtype
        self._region = region
        self._sends = sends
        self._input_roles = input_roles
        self._ctx = ctx
        self._watch = session.note_overflow if session.watches_overflow else None
        self._entry: CacheEntry | None = None
        self._has_run = self._awaits_backward = False

    def look_up(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Find out what the cache holds of Dynamo's graph ``gm``.

        It holds nothing of a graph whose runtime is told by the passes what to do, beyond numbers
        and text: one in float16, or one that sends gradients.
        """
        config = self._ctx.config
        if not is_cached(config) or self._ctx.scaled is not None or self._sends:
            return
        mine = (self.cache_key(), self.is_active(), self._input_roles, self._ctx.input_names,
                sorted(self._private), self._ctx.region, self._ctx.assigned)  # fmt: skip
        try:
            self._entry = find_entry(f"{mine}\n{describe(gm, inputs)}", config.cache_dir)
        except IndescribableError:
            return

    def cache_token(self) -> str:
        """Return what an entry of AOTAutograd's cache is keyed by, or '' if there must be none."""
        return "" if self._entry is None else self._entry.token

    def functions(self) -> Sequence[str]:
        """Return the dotted names of our functions that Dynamo's graphs call."""
        return FUNCTIONS

    def finish(self) -> None:
        """Keep what was found out, or take it from the cache if the passes did not run."""
        if self._entry is None or self._awaits_backward:
            return
        if self._has_run:
            self._entry.write(collect(self._region, self._ctx))
        elif self._entry.findings is not None:
            restore(self._entry.findings, self._region, self._ctx)
            self._dump()

    def is_active(self) -> bool:
        """Whether any ATen pass may change a graph."""
        is_wanted = self._dtype is not torch.float32 or self._sends
        return is_wanted and self._manager.rewrites(Stage.ATEN)

    def keeps_order(self) -> bool:
        """Whether nodes are to run in the order of the graph: buckets overlap with backward."""
        return self._sends

    def cache_key(self) -> str:
        """Return the passes, their options and toggles, and a hash of our sources."""
        return f"{self._manager.cache_key()};{source_hash(Path(mpcompile.__file__).parent)}"

    def rewrite(self, gm: GraphModule) -> None:
        """Run the ATen passes on a joint or inference graph, in place."""
        links.copy_forward_tags(gm.graph)
        gradients.mark_private(gm.graph, self._private)
        gradients.drop_copies(gm.graph)
        self._ctx.updates_read = {
            name: gradients.positions_of(gm.graph, positions)
            for name, positions in self._ctx.updates_read.items()
        }
        roles = find_roles(gm.graph, self._input_roles)
        self._ctx.roles = roles
        if self._ctx.scaled is not None:
            self._ctx.scaled.buffers = written_state(roles)
        region = self._region
        region.kind = roles.kind
        region.draws_random = any(map(nodes.draws_random, gm.graph.nodes))
        region.aten_before = format_graph(gm.graph)
        region.ops_before = measure_ops(gm.graph)
        region.add_passes(self._manager.run(Stage.ATEN, gm, self._ctx))
        region.add_passes(self._manager.run(Stage.RUNTIME, gm, self._ctx))
        region.ops_after = measure_ops(gm.graph)
        region.buckets = measure_buckets(gm.graph)
        region.casts, region.decisions = measure_casts(gm.graph)
        self._has_run = True
        self._awaits_backward = InputRole.TANGENT in roles.inputs.values()
        self._dump()

    def _dump(self) -> None:
        if self._ctx.config.report_dir is not None:
            dump_region(self._region, self._ctx.config.report_dir)

    def observe(self, gm: GraphModule, is_backward: bool) -> Callable[..., Any] | None:
        """Note what a graph keeps for backward and holds at its peak; watch it if asked to."""
        if is_backward and self._region.kind is GraphKind.TRAINING:
            self._region.saved_bytes = measure_saved(gm.graph)
        elif self._region.kind is GraphKind.TRAINING and not self._region.saved_bytes:
            self._region.saved_bytes = measure_values(saved_values(gm.graph))
        self._measure_memory(gm.graph, is_backward)
        if is_backward and self._awaits_backward:  # may be lowered when it is first run
            self._awaits_backward = False
            self.finish()
        if self._watch is None:
            return None
        return watched(gm, self._region.index, is_backward, self._watch)

    def _measure_memory(self, graph: Graph, is_backward: bool) -> None:
        inner = set() if is_backward else backward_nodes(graph)
        part = GraphPart.BACKWARD if is_backward else GraphPart.WHOLE
        if self._region.kind is GraphKind.TRAINING and not inner and not is_backward:
            part = GraphPart.FORWARD
        self._memory.measure(graph, find_roles(graph, self._input_roles).inputs, inner, part)
        self._region.peak = self._memory.peak
