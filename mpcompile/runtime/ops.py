"""``mpcompile::update(handle, grads)``: the op that stands for an update in a graph.

Parameters, state and hyperparameters are in a table behind the handle, so no graph, no guard and no
compiler sees them. The handle is a hash of what the optimizer is, with a counter for equal ones: a
graph cached by another process must never meet another optimizer's update.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.errors import CaptureError
from mpcompile.runtime.grads import ClipNorm, ClipValue, GradPlan
from mpcompile.runtime.structure import SINGLE_TENSOR
from mpcompile.runtime.tracing import step_code

if TYPE_CHECKING:
    from mpcompile.runtime.update import OptimizerUpdate

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define("update(str handle, Tensor?[] grads) -> ()")
_LIBRARY.define(
    "update_clipped(str handle, Tensor?[] grads, str[] kinds, float[] bounds, float[] orders, "
    "bool write) -> Tensor"
)
_updates: weakref.WeakValueDictionary[str, OptimizerUpdate] = weakref.WeakValueDictionary()


def content_hash(optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of the optimizer's class, its step's source, its groups and parameters.

    Values that change from step to step (numbers, tensors) are not part of it.
    """
    step: Any = step_code(optimizer)
    try:
        source = inspect.getsource(step)
    except (OSError, TypeError):
        source = step.__code__.co_code.hex()
    parts = [type(optimizer).__module__, type(optimizer).__qualname__, source]
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key == "params":
                parts += [f"{tuple(p.shape)} {p.dtype} {p.device.type}" for p in value]
            elif key not in SINGLE_TENSOR:
                is_constant = isinstance(value, (bool, str)) or value is None
                parts.append(f"{key}={value if is_constant else type(value).__name__}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def register(update: OptimizerUpdate) -> None:
    """Give ``update`` a handle that ``mpcompile::update`` takes."""
    content = content_hash(update.optimizer)
    position = 0
    while f"{content}-{position}" in _updates:
        position += 1
    update.handle = f"{content}-{position}"
    _updates[update.handle] = update


def find(handle: str) -> OptimizerUpdate:
    """Return the update behind ``handle``.

    Raises:
        CaptureError: there is none; the graph belongs to an optimizer that is gone.
    """
    update = _updates.get(handle)
    if update is None:
        raise CaptureError(
            f"mpcompile::update: no optimizer has the handle {handle}. The graph was compiled for "
            "one that is gone, or for another program; compile the step again."
        )
    return update


def _update(handle: str, grads: Sequence[torch.Tensor | None]) -> None:
    """Run the update; an empty list of gradients means the parameters' ``.grad``."""
    find(handle).run(list(grads) or None)


def _update_clipped(
    handle: str,
    grads: Sequence[torch.Tensor | None],
    kinds: Sequence[str],
    bounds: Sequence[float],
    orders: Sequence[float],
    write: bool,
) -> torch.Tensor:
    """Clip inside the update; return the last norm, or zero if none was taken.

    Args:
        handle: whose update.
        grads: as for ``update``.
        kinds: what to do in order, ``norm`` or ``value``.
        bounds: the largest norm or magnitude of each.
        orders: the order of each norm.
        write: leave the clipped gradients in ``grads``, because the user sees them.
    """
    clips = tuple(
        ClipNorm(bound, order) if kind == "norm" else ClipValue(bound)
        for kind, bound, order in zip(kinds, bounds, orders, strict=True)
    )
    outcome = find(handle).run(list(grads) or None, GradPlan(clips=clips, write=write))
    return torch.zeros(()) if outcome.norm is None else outcome.norm


_LIBRARY.impl("update", _update, "CompositeExplicitAutograd")
_LIBRARY.impl("update_clipped", _update_clipped, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::update", lambda handle, grads: None, lib=_LIBRARY)
torch.library.register_fake(
    "mpcompile::update_clipped", lambda *args: torch.empty(()), lib=_LIBRARY
)
