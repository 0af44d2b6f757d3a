"""The report of a step: plain data, filled in while the step is compiled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpcompile.config import Config
from mpcompile.distributed.record import GraphBucket, SyncRecord
from mpcompile.graph.diff import format_diff
from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.measure import CastRecord, DecisionRecord, OpTotals
from mpcompile.inspection.memory import MemoryPeak
from mpcompile.pass_base import PassRecord, Stage
from mpcompile.runtime.record import ScaleRecord, UpdateRecord


@dataclass(frozen=True)
class GraphPrints:
    """The prints of one graph: before all passes, after each, after all.

    Attributes:
        before: print before the first pass.
        after: print after the last.
        passes: what ran in between, in order.
    """

    before: str
    after: str
    passes: tuple[PassRecord, ...]

    def after_pass(self, name: str) -> str:
        """Return the print right after the pass called ``name``.

        Raises:
            KeyError: no such pass ran on this graph.
        """
        for record in self.passes:
            if record.name == name:
                return record.after
        known = ", ".join(record.name for record in self.passes) or "none"
        raise KeyError(f"no pass {name!r} ran on this graph; these did: {known}")

    def diff(self, name: str | None = None) -> str:
        """Return what all passes changed, or the one called ``name``: op counts and a text diff.

        Raises:
            KeyError: no such pass ran on this graph.
        """
        if name is None:
            return format_diff(self.before, self.after)
        after = self.after_pass(name)
        index = [record.name for record in self.passes].index(name)
        before = self.passes[index - 1].after if index else self.before
        return format_diff(before, after)


@dataclass(frozen=True)
class OverflowRecord:
    """The first node of a run that gave Inf or NaN for finite inputs.

    Attributes:
        region: number of its graph.
        node: its name.
        text: the node as graphs are printed.
        line: the user's line, or ''.
        is_backward: whether it is in the backward graph.
    """

    region: int
    node: str
    text: str
    line: str
    is_backward: bool


@dataclass
class RegionReport:
    """What was done to one graph of the step.

    Attributes:
        index: number of the region, in the order in which they were compiled.
        grad_enabled: whether anything in the graph is computed with grad mode on.
        ended_by: what ended the graph before its frame returned, or ''.
        ended_at: the user's line of it, or ''.
        kind: forward+backward, forward, or update; None until the graph was traced.
        ops_before: totals before the passes.
        ops_after: totals after them.
        casts: casts in the rewritten graph.
        decisions: precision and reason of each node.
        buckets: gradients that the graph sends to other ranks.
        saved_bytes: bytes that forward keeps for backward, by dtype.
        peak: what the graph holds where it holds most; of a graph that is cut into forward and
            backward, the larger of the two.
        draws_random: whether the graph draws random numbers, for dropout say.
        pass_records: every pass, Dynamo's stage first.
        aten_before: print of the ATen graph before the passes, ``dynamo_before`` that of Dynamo's.
        from_cache: whether ATen passes and lowering ran in an earlier process, to the same end.
    """

    index: int
    grad_enabled: bool
    dynamo_before: str
    ended_by: str = ""
    ended_at: str = ""
    kind: GraphKind | None = None
    ops_before: OpTotals = field(default_factory=OpTotals)
    ops_after: OpTotals = field(default_factory=OpTotals)
    casts: list[CastRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    buckets: list[GraphBucket] = field(default_factory=list)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    peak: MemoryPeak | None = None
    draws_random: bool = False
    pass_records: list[PassRecord] = field(default_factory=list)
    aten_before: str = ""
    from_cache: bool = False

    def add_passes(self, records: Sequence[PassRecord]) -> None:
        """Append what the manager recorded."""
        self.pass_records.extend(records)

    @property
    def graph(self) -> GraphPrints:
        """The ATen graph, forward and backward together: what the passes decide on."""
        return GraphPrints(self.aten_before, self.aten_after, self._of_stage(Stage.ATEN))

    @property
    def aten_after(self) -> str:
        """Print of the ATen graph after the passes."""
        return _last_print(self.aten_before, self._of_stage(Stage.ATEN))

    @property
    def dynamo_graph(self) -> GraphPrints:
        """Dynamo's graph, forward only, in torch functions and methods."""
        records = self._of_stage(Stage.DYNAMO)
        return GraphPrints(self.dynamo_before, _last_print(self.dynamo_before, records), records)

    def _of_stage(self, stage: Stage) -> tuple[PassRecord, ...]:
        return tuple(record for record in self.pass_records if record.stage is stage)


def _last_print(before: str, records: Sequence[PassRecord]) -> str:
    """The print after the last of ``records``, or ``before`` if there is none."""
    return records[-1].after if records else before


@dataclass
class StepReport:
    """What was done to a step. ``str()`` gives all tables.

    Attributes:
        config: the options that were in force.
        regions: one entry per graph.
        updates: the optimizers' updates and their kernels.
        whole: for each graph that holds its updates, the parts that run in turn.
        replayed: how many steps were replayed eagerly and compared (``check``).
        syncs: what each DistributedDataParallel module sends between ranks.
        breaks: why and where graphs ended early: ``(reason, line)``, each once.
        loss_scale: the loss scale when the report was asked for; None if nothing was scaled.
        overflow: where the first Inf or NaN came from; only ``explain`` in float16 looks for it.
    """

    config: Config
    regions: list[RegionReport] = field(default_factory=list)
    breaks: list[tuple[str, str]] = field(default_factory=list)
    updates: list[UpdateRecord] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    replayed: int = 0
    loss_scale: ScaleRecord | None = None
    overflow: OverflowRecord | None = None
    syncs: list[SyncRecord] = field(default_factory=list)

    def add_break(self, reason: str, line: str) -> None:
        """Note a graph break; repeats are dropped."""
        if (reason, line) not in self.breaks:
            self.breaks.append((reason, line))

    def assignment(self) -> list[dict[str, str | int]]:
        """Return the precision of every node, as ``options={"assignment": ...}`` takes it."""
        return [
            {
                "region": region.index,
                "node": decision.node,
                "op": decision.op,
                "precision": decision.precision,
                "reason": decision.reason,
            }
            for region in self.regions
            for decision in region.decisions
        ]

    def save_assignment(self, path: str | Path) -> None:
        """Write ``assignment()`` to ``path`` as JSON, to be edited and read back."""
        Path(path).write_text(json.dumps(self.assignment(), indent=1) + "\n")

    def __str__(self) -> str:
        """Return the tables as text."""
        from mpcompile.inspection.tables import format_report

        return format_report(self)
