"""Which parameters share a bucket, in which order buckets are sent, and in which dtype."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        index: position in the order of sending, from 0.
        names: their parameters, in the order in which they lie in the bucket.
        sizes: elements of each.
        dtype: what the gradients are.
        wire: what is sent.
        turn: number of the backward in a step that they come from.
    """

    index: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    wire: torch.dtype
    turn: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of all gradients together."""
        return sum(self.sizes)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank contributes to one all-reduce of the bucket."""
        return self.num_elements * self.wire.itemsize

    def __str__(self) -> str:
        """Return the bucket as one line, equal on two ranks if they agree on it."""
        members = " ".join(f"{n}[{s}]" for n, s in zip(self.names, self.sizes, strict=True))
        return f"bucket {self.index}: {_name(self.dtype)} sent as {_name(self.wire)}: {members}"


@dataclass(frozen=True)
class SumOnWire:
    """Where a gradient is found that an update reads as it is on the wire.

    Attributes:
        handle: of the module.
        bucket: index of the bucket, which says what the sum is multiplied by.
    """

    handle: str
    bucket: int


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of one module, and what else ranks must agree on.

    Attributes:
        buckets: in the order of sending.
        settings: options that change what is sent, as lines of text.
    """

    buckets: tuple[Bucket, ...]
    settings: tuple[str, ...] = ()

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """What ranks must agree on, as text."""
        return (*self.settings, *(str(bucket) for bucket in self.buckets))

    @property
    def num_turns(self) -> int:
        """How often gradients are reduced in a step."""
        return len({bucket.turn for bucket in self.buckets})

    def digest(self) -> int:
        """Return a hash of ``lines``."""
        return digest(self.lines)


@functools.lru_cache(maxsize=64)
def digest(lines: tuple[str, ...]) -> int:
    """Return a hash of ``lines`` that fits a signed 64-bit integer."""
    text = "\n".join(lines)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def wire_of(dtype: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """Return what gradients of ``dtype`` are sent as: only float32 ones are cast."""
    return wire if dtype is torch.float32 else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
