"""What one compiled graph does with one DistributedDataParallel module: plain data."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mpcompile.distributed.module import ModuleSync
from mpcompile.distributed.plan import BucketPlan


@dataclass(frozen=True)
class GraphSync:
    """The collectives of a graph for one module.

    Attributes:
        module: whose gradients.
        plan: the buckets that the graph sends, in order; none under ``no_sync``.
        broadcasts: whether a forward fetches the buffers of rank 0.
        updates: what becomes of the means, as text. Ranks that clip or widen them in different
            places would round differently, and drift apart.
    """

    module: ModuleSync
    plan: BucketPlan
    broadcasts: bool
    updates: str = ""

    @property
    def communicates(self) -> bool:
        """Whether other ranks have to take part."""
        return bool(self.plan.buckets) or self.broadcasts

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """What ranks must agree on, as text."""
        head = (f"updates: {self.updates}", f"broadcast of buffers: {self.broadcasts}")
        return (*head, *self.plan.lines)
