"""The list of patterns and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import Build

PATTERNS: dict[str, Build] = {}
IN_REGIONS: set[str] = set()
"""Patterns that are not captured whole; the report says why."""
TOLERANCE: dict[str, float] = {}
"""How far patterns may be from eager that it rounds in another order, relative to the largest."""

BEFORE_2_13 = torch.__version__ < "2.13"  # a TorchVersion compares as versions do
"""Dynamo breaks at more, and rounds twice where ``add_`` or ``lerp_`` has a factor."""
ROUNDED_TWICE = 1e-6 if BEFORE_2_13 else 0.0


def pattern(
    given: str = "", *, whole: bool = True, tolerance: float = 0.0
) -> Callable[[Build], Build]:
    """Register a program under a name, by default that of the function that builds it."""

    def add(build: Build) -> Build:
        name = given or build.__name__.strip("_")
        assert name not in PATTERNS, name
        PATTERNS[name] = build
        if not whole:
            IN_REGIONS.add(name)
        if tolerance:
            TOLERANCE[name] = tolerance
        return build

    return add


def network(seed: int = 0) -> Any:
    """Return 6 -> 8 -> 3; untyped, for what patterns do to its layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def pair(call: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Return ``(x, target)`` of call ``call``."""
    generator = torch.Generator().manual_seed(call)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)
