"""What a table remembers of its optimizer in Python: which objects it is made of, and its groups.

Whether these are as they were is asked before every launch; hyperparameters that changed are read
into the table.
"""

from __future__ import annotations

import array
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpcompile.runtime.analysis import Analysis
from mpcompile.runtime.classes import group_tensors, group_values
from mpcompile.runtime.coupling import total_name
from mpcompile.runtime.guards import evaluate, guards_hold
from mpcompile.runtime.structure import attributes, describe_group, set_entry
from mpcompile.runtime.table import Watch


class WatchedOptimizer:
    """An optimizer as it was when a table was made for it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        analyses: Sequence[tuple[int, Analysis]],
        shared: tuple[Sequence[str], array.array[Any]],
        reads_tensors: bool,
        cache_dir: Path | None,
    ) -> None:
        """Remember the objects whose replacement makes the table stale; read the groups.

        Args:
            optimizer: whose table it is.
            analyses: of each row, with the number of its group.
            shared: names of the hyperparameters that the kernel reads, and where they go, group by
                group.
            reads_tensors: whether the kernel reads tensors of the groups where they are.
            cache_dir: where native code is kept.
        """
        self._optimizer = optimizer
        self._results = analyses[0][1].group_results
        self._guards = {(group, id(a)): a.guards for group, a in analyses}
        self._names, self._shared = shared
        self._reads_tensors = reads_tensors
        groups, state = optimizer.param_groups, optimizer.state
        self._containers = [groups, state, *(group["params"] for group in groups)]
        self._watch = Watch(cache_dir)
        self._watch.watch_list(groups)
        for group in groups:
            self._watch.watch_list(group["params"])
        self._watch.watch_dict(state)
        self._watch.watch_entries([e for e in state.values() if isinstance(e, dict)])
        self._snapshots: list[list[Any]] = []
        self._group_tensors: list[dict[str, torch.Tensor]] = []
        self._structures = [describe_group(group) for group in groups]
        self._attributes = attributes(optimizer)
        self._refresh()

    def is_current(self) -> bool:
        """Whether the table still applies; reads hyperparameters that changed."""
        return self._same_containers() and self._watch.holds() and self._refresh()

    def _same_containers(self) -> bool:
        """Whether the optimizer holds the watched lists and dict; load_state_dict replaces them."""
        groups = self._optimizer.param_groups
        now = [groups, self._optimizer.state, *(group["params"] for group in groups)]
        return len(now) == len(self._containers) and all(map(operator.is_, now, self._containers))

    def _refresh(self) -> bool:
        """Read the groups if they changed; return whether the traces still apply."""
        groups = self._optimizer.param_groups
        now = [[v for k, v in group.items() if k != "params"] for group in groups]
        if attributes(self._optimizer) != self._attributes:
            return False
        if not any(s.tensors for s in self._structures) and now == self._snapshots:
            return True
        if [describe_group(group) for group in groups] != self._structures:
            return False
        values = [group_values(group) for group in groups]
        if not all(guards_hold(guards, values[g]) for (g, _), guards in self._guards.items()):
            return False
        tensors = [group_tensors(group) for group in groups] if self._reads_tensors else []
        if self._snapshots and not _same_objects(tensors, self._group_tensors):
            return False
        self._group_tensors, self._snapshots = tensors, now
        width = len(self._names)
        for index, group in enumerate(values):
            for position, name in enumerate(self._names):
                if index * width + position < len(self._shared) and name in group:
                    self._shared[index * width + position] = group[name]
        return True

    def write_results(self, totals: Sequence[float]) -> None:
        """Give the groups the numbers that the step leaves in them; ``totals`` are of all rows."""
        if not self._results:
            return
        groups = self._optimizer.param_groups
        values = {
            f"g{index}:{name}": value
            for index, group in enumerate(groups)
            for name, value in group_values(group).items()
        }
        values |= {total_name(number): total for number, total in enumerate(totals)}
        new = [(name, expr.dtype, evaluate(expr, values)) for name, expr in self._results]
        for name, dtype, value in new:
            owner, _, path = name.partition(":group.")
            set_entry(groups[int(owner[1:])], path, int(value) if dtype == "i64" else value)


def _same_objects(
    now: Sequence[dict[str, torch.Tensor]], before: Sequence[dict[str, torch.Tensor]]
) -> bool:
    return all(a[k] is b[k] for a, b in zip(now, before, strict=True) for k in a)
