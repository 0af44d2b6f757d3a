"""The ops through which graphs reach the loss scale of their step.

The state is behind a handle, not an input: an input that changes between forward and backward could
not be saved for backward, and a constant would be baked into generated code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpcompile.runtime.loss_scale import find_scale

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define(
    "loss_scale(str handle, Tensor[] tangents, bool outside, float[] own) -> (Tensor, Tensor)"
)
_LIBRARY.define("note_overflow(str handle, int source, Tensor inverse, Tensor[] sums) -> Tensor")
_LIBRARY.define("skipping(str handle, Tensor like) -> Tensor")
_LIBRARY.define("skip_update(str handle, int source, Tensor[] sums) -> Tensor")


def _loss_scale(
    handle: str, tangents: Sequence[Tensor], outside: bool, own: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the scale and its inverse, for a backward that begins with ``tangents``.

    ``outside``: they come from outside the graph, in which the program scales each by one of
    ``own`` more.
    """
    scale = find_scale(handle)
    return scale.factors(tangents, own) if outside else scale.whole_factors(tangents[0].device)


def _note_overflow(handle: str, source: int, inverse: Tensor, sums: Sequence[Tensor]) -> Tensor:
    """Note overflows; return a copy of ``inverse``, so that something in the graph needs this."""
    find_scale(handle).note(source, sums)
    return inverse.clone()


def _skip_update(handle: str, source: int, sums: Sequence[Tensor]) -> Tensor:
    """Return whether the update that reads gradients with these sums is to be left out."""
    return find_scale(handle).skip_in_graph(source, sums)


def _skipping(handle: str, like: Tensor) -> Tensor:
    """Return whether an update of this step was skipped so far, on the device of ``like``."""
    return find_scale(handle).skipping(like.device)


def _fake_scale(
    handle: str, tangents: Sequence[Tensor], outside: bool, own: Sequence[float]
) -> tuple[Tensor, Tensor]:
    device = tangents[0].device
    return torch.empty((), device=device), torch.empty((), device=device)


_LIBRARY.impl("loss_scale", _loss_scale, "CompositeExplicitAutograd")
_LIBRARY.impl("note_overflow", _note_overflow, "CompositeExplicitAutograd")
_LIBRARY.impl("skipping", _skipping, "CompositeExplicitAutograd")
_LIBRARY.impl("skip_update", _skip_update, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::loss_scale", _fake_scale, lib=_LIBRARY)
torch.library.register_fake(
    "mpcompile::note_overflow",
    lambda handle, source, inverse, sums: torch.empty_like(inverse),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "mpcompile::skipping",
    lambda handle, like: torch.empty((), dtype=torch.bool, device=like.device),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "mpcompile::skip_update",
    lambda handle, source, sums: torch.empty((), dtype=torch.bool, device=sums[0].device),
    lib=_LIBRARY,
)
