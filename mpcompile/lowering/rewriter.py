"""What happens to a graph between tracing and lowering, as the lowerings see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.fx import GraphModule

Compiled = Callable[..., Any]

# For both lowerings: see the head of the package.
TRACING_DECOMPOSITIONS: dict[Any, Any] = {}


class Rewriter(Protocol):
    """Called by a lowering once per graph and stage."""

    def rewrite(self, gm: GraphModule) -> None:
        """Run the ATen passes on a joint or inference graph, in place."""

    def observe(self, gm: GraphModule, is_backward: bool) -> None:
        """Look at a forward or backward graph after partitioning."""

    def cache_key(self) -> str:
        """Return text that differs if ``rewrite`` may do something else."""

    def is_active(self) -> bool:
        """Whether ``rewrite`` may change a graph."""
