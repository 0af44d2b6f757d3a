"""Run passes: toggle, time, verify, record. Knows no pass by name."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.fx import GraphModule

from mpcompile.config import Config
from mpcompile.errors import GraphVerifyError
from mpcompile.graph.printer import format_graph
from mpcompile.graph.verify import Visible, verify_graph, verify_visible, visible_types
from mpcompile.pass_base import GraphPass, PassContext, PassRecord, Stage


class PassManager:
    """Runs the passes of one pipeline over graphs.

    What the user can see of a graph is checked after every ATen pass; the whole graph too if
    ``config.verify_graph``. A pass that fails raises, and the caller throws the graph away.
    """

    def __init__(self, passes: Sequence[GraphPass], config: Config) -> None:
        """Take the pipeline in the order in which it runs.

        Raises:
            ValueError: a pass stands before one that it must run after.
        """
        self._passes = tuple(passes)
        self._config = config
        _check_order(self._passes)

    def is_enabled(self, name: str) -> bool:
        """Whether the pass called ``name`` runs."""
        return self._config.is_pass_enabled(name)

    def rewrites(self, stage: Stage) -> bool:
        """Whether any pass of ``stage`` runs."""
        return any(item.stage is stage and self.is_enabled(item.name) for item in self._passes)

    def cache_key(self) -> str:
        """Return text that differs if the passes, their options or their toggles differ."""
        active = [repr(item) for item in self._passes if self.is_enabled(item.name)]
        return ";".join([*active, self._config.cache_key()])

    def run(self, stage: Stage, gm: GraphModule, ctx: PassContext) -> list[PassRecord]:
        """Run every pass of ``stage`` on ``gm`` in place and record what each did.

        Raises:
            PassError: a pass cannot rewrite the graph.
            GraphVerifyError: a pass broke it.
        """
        visible = visible_types(gm.graph) if stage is Stage.ATEN else []
        text = format_graph(gm.graph)
        records = []
        for item in self._passes:
            if item.stage is not stage:
                continue
            if not self.is_enabled(item.name):
                records.append(PassRecord(item.name, stage, False, 0, 0.0, text))
                continue
            start = time.perf_counter_ns()
            rewrites = item.run(gm, ctx)
            time_us = (time.perf_counter_ns() - start) / 1e3
            before, text = text, format_graph(gm.graph)
            if stage is Stage.ATEN:
                self._check(gm, visible, item.name, changed=text != before)
            if rewrites == 0 and text != before:
                raise GraphVerifyError(f"{item.name}: reported no rewrite but changed the graph")
            records.append(PassRecord(item.name, stage, True, rewrites, time_us, text))
        gm.recompile()
        return records

    def _check(self, gm: GraphModule, visible: list[Visible], name: str, changed: bool) -> None:
        if self._config.verify_graph:
            verify_graph(gm.graph, visible, name)
        elif changed:
            verify_visible(gm.graph, visible, name)


def _check_order(passes: Sequence[GraphPass]) -> None:
    seen: set[str] = set()
    names = {item.name for item in passes}
    for item in passes:
        late = [name for name in item.runs_after if name in names and name not in seen]
        if late:
            raise ValueError(f"pipeline: {item.name} must run after {', '.join(late)}")
        seen.add(item.name)
