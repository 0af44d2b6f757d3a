"""What updates there were and what their kernels do: plain data for reports."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

_PROBE_BYTES = 64 << 20
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel and its table.

    Attributes:
        name: what it updates.
        source: its C++ text.
        num_tensors: parameters that one launch updates.
        bytes_read: of one launch, each element of each buffer once per pass.
        bytes_written: the same for what it writes.
        was_cached: whether it was found built.
        device: where it runs.
    """

    name: str
    source: str
    num_tensors: int
    bytes_read: int
    bytes_written: int
    was_cached: bool
    device: torch.device = _HOST

    @property
    def bound_s(self) -> float:
        """Seconds that moving these bytes takes on this machine: no kernel is faster."""
        threads = torch.get_num_threads()
        return (self.bytes_read + self.bytes_written) / memory_bandwidth(threads, self.device)


@dataclass(frozen=True)
class UpdateRecord:
    """The update of one optimizer. ``reason`` says why it runs as eager, or is empty.

    ``state_bytes`` are those of the tensors in its state.
    """

    optimizer: str
    reason: str
    kernels: tuple[KernelRecord, ...]
    state_bytes: int = 0


@dataclass(frozen=True)
class ScaleRecord:
    """The loss scale of a step.

    Attributes:
        scale: what it is now.
        policy: how it changes, in words.
        overflows: steps that overflowed so far.
        falls: how many of the last steps overflowed one after the other, each halving the scale.
        at_floor: the last overflow met the scale at its floor.
        first: whose gradient overflowed first in the last overflow, or ''.
        own_scale: power of two by which the program scales its loss itself, 1 if it does not.
    """

    scale: float
    policy: str
    overflows: int
    falls: int
    at_floor: bool
    first: str
    own_scale: float


@functools.cache
def memory_bandwidth(num_threads: int, device: torch.device = _HOST) -> float:
    """Return the bytes a second that ``device`` reads and writes, from a copy.

    On the host with ``num_threads`` threads.
    """
    source = torch.ones(_PROBE_BYTES // 4, device=device)
    dest = torch.empty_like(source)
    dest.copy_(source)
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.get_num_threads
    best = float("inf")
    for _ in range(3):
        wait()
        start = time.perf_counter()
        dest.copy_(source)
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * _PROBE_BYTES / best
