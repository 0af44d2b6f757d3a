"""What goes around a graph in which DistributedDataParallel is at work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from torch.fx import GraphModule

from mpcompile.capture import dynamo_api, dynamo_ddp
from mpcompile.capture.carried_backward import BackwardCall
from mpcompile.capture.segments import NotSplittableError, Part
from mpcompile.capture.session import Session
from mpcompile.distributed.graph_sync import GraphSync
from mpcompile.lowering import Compiled
from mpcompile.pass_base import Buckets


@dataclass
class Synchronised:
    """The DDP modules of one graph while it is compiled.

    Attributes:
        wrapped: what was traced of them.
        buckets: what the compiled graph sends; filled in by the pass that sends.
        num_regions: how many regions were reported before.
    """

    wrapped: dynamo_ddp.Traced
    num_regions: int
    buckets: Buckets = field(default_factory=dict)

    def check_parts(self, parts: list[Part]) -> None:
        """Refuse a backward that autograd carries on: what it would compute again must not be sent.

        Raises:
            NotSplittableError: there is one.
        """
        for part in parts if self.wrapped.modules else ():
            if isinstance(part, BackwardCall):
                reason = "a backward after an update of DistributedDataParallel goes through it"
                raise NotSplittableError(reason, part.node)

    def around(self, function: Compiled, session: Session, updates: str = "") -> Compiled:
        """Return ``function``, which runs the graph, with what ranks do together at its ends.

        Args:
            function: the compiled graph.
            session: whose step it is.
            updates: what becomes of gradients, as text that is equal on ranks that do the same.

        Raises:
            SyncError: another rank runs another graph already, or is gone.
        """
        syncs = [
            GraphSync(
                item.sync,
                item.sync.plan(self.buckets.get(item.sync.handle, ())),
                item.broadcasts,
                updates,
            )
            for item in self.wrapped.modules.values()
            if item.has_forward
        ]
        if not syncs:
            return function
        if not session.sync.offer(syncs):
            del session.report.regions[self.num_regions :]
            restart_in_regions(session, "another rank has it in regions, or sends other buckets")
        return dynamo_api.without_dynamo(session.sync.in_graph(function, syncs))


def begin(gm: GraphModule, session: Session) -> Synchronised:
    """Return what is known of DDP in ``gm``; trace it anew, in regions, if it must not be used."""
    wrapped = dynamo_ddp.current() if dynamo_api.is_tracing() else dynamo_ddp.Traced()
    problem = wrapped.problem(is_broken=dynamo_api.break_of(gm) is not None)
    if problem:
        restart_in_regions(session, problem)
    return Synchronised(wrapped, len(session.report.regions))


def restart_in_regions(session: Session, reason: str, line: str = "") -> NoReturn:
    """Have the function that is being compiled traced anew, in regions."""
    session.report.add_break(f"not captured whole: {reason}", line)
    session.leave_to_regions()
    dynamo_api.restart_tracing(reason)
