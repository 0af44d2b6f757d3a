"""What a module sent between ranks: plain data for reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpcompile.distributed.plan import Bucket


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in the last backward, in milliseconds since the first bucket was sent.

    Attributes:
        start_ms: its last gradient existed and it was sent.
        arrive_ms: its mean existed.
    """

    start_ms: float
    arrive_ms: float


@dataclass(frozen=True)
class GraphBucket:
    """One bucket that a graph sends by itself.

    Attributes:
        bucket: what is sent.
        start: position of the node that starts it.
        wait: position of the node that waits for it.
        num_nodes: how many nodes the graph has.
        read_as: dtype of what is handed out: of the wire where only an update reads it.
    """

    bucket: Bucket
    start: int
    wait: int
    num_nodes: int
    read_as: torch.dtype


@dataclass(frozen=True)
class SyncRecord:
    """The gradients of one DistributedDataParallel module.

    Attributes:
        module: class of the wrapped module.
        num_ranks: how many ranks average.
        sender: what decides the dtype on the wire, and why.
        buckets: what is sent, in order; empty if stock torch sends.
        times: one entry a bucket.
        wait_ms: when backward began to wait for buckets.
        num_backwards: how often gradients were reduced so far.
        num_resent: buckets that were sent a second time, after an overflow.
        error_feedback: whether what the cast rounds off is kept.
    """

    module: str
    num_ranks: int
    sender: str
    buckets: tuple[Bucket, ...] = ()
    times: tuple[BucketTimes, ...] = ()
    wait_ms: float = 0.0
    num_backwards: int = 0
    num_resent: int = 0
    error_feedback: bool = False

    @property
    def wire(self) -> str:
        """The dtypes on the wire, most bytes first."""
        sums: dict[str, int] = {}
        for bucket in self.buckets:
            name = str(bucket.wire).removeprefix("torch.")
            sums[name] = sums.get(name, 0) + bucket.wire_bytes
        return ", ".join(sorted(sums, key=lambda name: -sums[name])) or "as the gradients"

    @property
    def bytes_a_step(self) -> int:
        """Bytes that a rank contributes to the all-reduces of one backward."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def bytes_a_parameter(self) -> float:
        """The same for each number that is trained."""
        return self.bytes_a_step / max(1, sum(bucket.num_elements for bucket in self.buckets))
