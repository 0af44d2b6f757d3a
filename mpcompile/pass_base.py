"""What a pass is: a name, a stage, what must precede it, and a rewrite.

Contract of every pass: a valid graph in, a valid graph out, or an error and the graph is thrown
away. A pass rewrites; it does not lint, time, log or read the environment. The manager does.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx import GraphModule

from mpcompile.config import Config
from mpcompile.distributed.plan import Bucket, SumOnWire
from mpcompile.graph.roles import Roles
from mpcompile.precision import TABLES, Table
from mpcompile.runtime.scaled_region import ScaledRegion

Buckets = dict[str, list[Bucket]]
"""What a program sends to other ranks, in order, by handle of the module it belongs to."""


class Stage(enum.Enum):
    """Which graph a pass rewrites."""

    DYNAMO = "dynamo"  # Dynamo's graph: torch functions and methods, before autograd
    RUNTIME = "runtime"  # no graph is rewritten: what the runtime does in its stead
    ATEN = "aten"  # functional ATen graph, forward and backward together


@dataclass
class PassContext:
    """What a pass may know beside the graph.

    Attributes:
        config: the user's options.
        region: number of the graph among those of the step, for names that outlive the graph.
        roles: what inputs and outputs are for; None in Dynamo's stage.
        assigned: precision by node name that the user read from a file, for this region.
        used_overrides: entries of ``keep_fp32`` and ``keep_half`` that named a node; written by
            the pass that reads them, so that one which names nothing can be reported.
        scaled: the graph's part in the loss scale; None if nothing is scaled.
        updates_read: by name of an update, which outputs are gradients that nothing else reads;
            they may stay scaled.
        on_wire: by name of an update, which of its gradients, in its order, it gets as they are on
            the wire; written by the pass that sends them.
        buckets: what the program sends to other ranks so far; written by the pass that sends.
        input_names: what the user calls each input of Dynamo's graph, in order.
    """

    config: Config
    region: int = 0
    roles: Roles | None = None
    assigned: Mapping[str, str] = field(default_factory=dict)
    used_overrides: set[str] = field(default_factory=set)
    scaled: ScaledRegion | None = None
    updates_read: Mapping[str, Sequence[int]] = field(default_factory=dict)
    on_wire: dict[str, tuple[SumOnWire | None, ...]] = field(default_factory=dict)
    buckets: Buckets = field(default_factory=dict)
    input_names: tuple[str, ...] = ()

    @property
    def half(self) -> torch.dtype:
        """The 16-bit dtype of the step, or float32 if nothing is to be cast."""
        return self.config.dtype

    @property
    def table(self) -> Table:
        """The precision table that the user chose."""
        return TABLES[self.config.table]


class GraphPass(ABC):
    """Base of all passes. Subclasses are frozen dataclasses whose fields are the pass's options.

    Class attributes:
        name: the file's name in kebab-case; the user toggles by it.
        stage: which graph it rewrites.
        exact: True if no number changes.
        runs_after: passes that must stand before it in the pipeline; checked, not used to sort.
        off: what switching it off means, for people.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    exact: ClassVar[bool]
    runs_after: ClassVar[tuple[str, ...]] = ()
    off: ClassVar[str]

    @abstractmethod
    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` in place and return the number of rewrites."""


@dataclass(frozen=True)
class PassRecord:
    """What one run of a pass did: plain data for reports.

    Attributes:
        name: the pass.
        stage: which graph it ran on, or would have.
        enabled: False if the user switched it off.
        rewrites: what ``run`` returned.
        time_us: how long ``run`` took, in microseconds.
        after: print of the graph after it; equal to the one before if nothing was rewritten.
    """

    name: str
    stage: Stage
    enabled: bool
    rewrites: int
    time_us: float
    after: str
