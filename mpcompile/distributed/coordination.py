"""Ranks run steps that fit: each tells the others what it is about to send before it sends it.

A step that is one graph sends other buckets than DDP's reducer does, and what is one graph on one
rank may break on another, where a print on rank 0 stands in it. So whoever is about to take part in
collectives announces them with a tiny all-reduce: a graph at the start of each run, a step in
regions at each forward of a wrapped module. Where ranks differ, graphs that are still being
compiled give way, and all go in regions; a graph that runs already cannot, and all ranks end with
an error that says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpcompile.distributed import ddp_api
from mpcompile.distributed.agreement import Intent, agree_on, announce, explain_difference
from mpcompile.distributed.graph_sync import GraphSync
from mpcompile.errors import SyncError

_IN_REGIONS = ("step: in regions",)
_CPU = torch.device("cpu")


class Coordinator:
    """What this rank has told the others in the current call of one compiled step."""

    def __init__(self) -> None:
        self._offered: tuple[str, ...] = ()
        self._group: dist.ProcessGroup | None = None
        self._replays = False

    def begin_call(self, replays: bool) -> None:
        """Begin a call; ``replays``: the step may be run again, eagerly, to compare."""
        self._offered, self._group, self._replays = (), None, replays

    def announce_regions(self, ddp: DistributedDataParallel) -> None:
        """Tell the ranks of ``ddp`` that a forward in regions begins; wait until all do the same.

        Raises:
            SyncError: another rank runs a graph, or is gone.
        """
        group = ddp_api.words_group(ddp)
        if group.size() == 1:
            return
        intent = Intent(_IN_REGIONS)
        while found := announce(intent, group, _CPU):
            if any(not item.is_open for item in found if item.lines != _IN_REGIONS):
                raise SyncError(explain_difference(found))

    def offer(self, syncs: Sequence[GraphSync]) -> bool:
        """Tell the other ranks what a graph will send that has just been compiled.

        Returns:
            Whether all ranks will send the same; if not, the graph must not be used.

        Raises:
            SyncError: another rank runs a graph already, or is gone.
        """
        groups, lines = _groups(syncs), _lines(syncs)
        for group in groups:
            is_open = len(groups) == 1  # others of a first group would not hear of a second
            if not self._announce(lines, group, is_open):
                return False
        self._offered = lines
        return True

    def confirm(self, syncs: Sequence[GraphSync]) -> None:
        """Tell the other ranks that a graph runs now, unless its offer has just told them.

        Raises:
            SyncError: another rank runs something else, or is gone.
        """
        lines = _lines(syncs)
        if lines != self._offered:
            for group in _groups(syncs):
                self._announce(lines, group, is_open=False)
        self._offered = ()
        self._group = next(iter(_groups(syncs)), self._group)

    def _announce(self, lines: tuple[str, ...], group: dist.ProcessGroup, is_open: bool) -> bool:
        found = announce(Intent(lines, is_open, self._replays), group, _CPU)
        if all(item.lines == lines for item in found):
            self._replays = self._replays and not found  # they differ in that
            return True
        if all(item.is_open or item.lines == _IN_REGIONS for item in found):
            return False
        raise SyncError(explain_difference(found))

    def agree_to_replay(self, is_ready: bool) -> bool:
        """Return whether all ranks are ready to run the step again, eagerly.

        Raises:
            SyncError: a rank is gone.
        """
        if self._group is None:
            return is_ready
        return self._replays and not bool(agree_on(torch.tensor(not is_ready), self._group))


def _groups(syncs: Sequence[GraphSync]) -> list[dist.ProcessGroup]:
    """Return the groups in which a graph communicates, in the order of its modules."""
    groups = (sync.module.words_group for sync in syncs if sync.communicates)
    return [group for group in dict.fromkeys(groups) if group.size() > 1]


def _lines(syncs: Sequence[GraphSync]) -> tuple[str, ...]:
    told = [line for sync in syncs if sync.communicates for line in sync.lines]
    return ("step: one graph", *told) if told else ()
