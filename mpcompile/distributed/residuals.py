"""Error feedback: what the cast to the wire dtype rounded off, kept for the next step.

Kept per bucket, as one flat float32 tensor that the next gradients of the bucket start from;
handed out and taken back per parameter, since buckets are rebuilt after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpcompile.distributed.plan import Bucket, BucketPlan


class Residuals:
    """What this rank owes to each gradient, as a part of the mean over ranks."""

    def __init__(self) -> None:
        self._flat: dict[int, torch.Tensor] = {}
        self._plan = BucketPlan(())
        self._loaded: dict[str, torch.Tensor] = {}

    def lay_out(self, plan: BucketPlan) -> None:
        """Follow a new plan; what is owed stays owed."""
        self._loaded = self.state()
        self._plan = plan
        self._flat = {}

    def of(self, bucket: Bucket, like: torch.Tensor) -> torch.Tensor:
        """Return the flat residual of ``bucket``, zeros at first, on the device of ``like``."""
        flat = self._flat.get(bucket.index)
        if flat is None:
            flat = self._flat[bucket.index] = torch.zeros_like(like)
            for name, part in _parts(bucket, flat):
                if name in self._loaded:
                    part.copy_(self._loaded[name].reshape(-1))
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of what is owed, flat, by the name of the parameter."""
        state = dict(self._loaded)
        for bucket in self._plan.buckets:
            if bucket.index in self._flat:
                for name, part in _parts(bucket, self._flat[bucket.index]):
                    state[name] = part.clone()
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what ``state`` gave."""
        self._flat = {}
        self._loaded = {name: part.clone() for name, part in state.items()}


def _parts(bucket: Bucket, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(zip(bucket.names, flat.split(bucket.sizes), strict=True))
