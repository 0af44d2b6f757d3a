"""What happens to a graph between tracing and lowering, as the lowerings see it.

Private torch API, seen in 2.11 to 2.14: ``TracingContext.fw_metadata`` and its ``bw_donated_idxs``.
"""

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


def keep_saved_values() -> None:
    """Have the backward that is being compiled write to nothing that the forward has saved for it.

    AOTAutograd lets it, unless its first run has to keep the graph, and then refuses to run it with
    ``retain_graph=True``. With dynamic shapes it is compiled before that is known.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


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
