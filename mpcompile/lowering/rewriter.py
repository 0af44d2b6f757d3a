"""What happens to a graph between tracing and lowering, as the lowerings see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

Compiled = Callable[..., Any]

# For both lowerings: see the head of the package.
TRACING_DECOMPOSITIONS: dict[Any, Any] = {}

# AOTAutograd's own way to recompute in flat graphs: ``rematerialise`` stands in for that.
_SWITCHED_OFF = ("remat_using_tags_for_fwd_loss_bwd_graph",)

AOT_CONFIG = {name: False for name in _SWITCHED_OFF if hasattr(torch._functorch.config, name)}
"""Settings of AOTAutograd while a graph is lowered; torch 2.11 has none of them."""


class Rewriter(Protocol):
    """Called by a lowering once per graph and stage."""

    def rewrite(self, gm: GraphModule) -> None:
        """Run the ATen passes on a joint or inference graph, in place."""

    def observe(self, gm: GraphModule, is_backward: bool) -> Callable[..., Any] | None:
        """Look at a forward or backward graph after partitioning.

        What is returned runs in its stead, where graphs run op by op.
        """

    def cache_key(self) -> str:
        """Return text that differs if ``rewrite`` may do something else."""

    def cache_token(self) -> str:
        """Return what AOTAutograd's cache is to be keyed by besides, or '' to keep it off.

        After a hit there ``rewrite`` and ``observe`` are not called.
        """

    def functions(self) -> Sequence[str]:
        """Return the dotted names of our functions that Dynamo's graphs call."""

    def is_active(self) -> bool:
        """Whether ``rewrite`` may change a graph."""

    def keeps_order(self) -> bool:
        """Whether nodes are to run in the order that ``rewrite`` leaves them in."""
