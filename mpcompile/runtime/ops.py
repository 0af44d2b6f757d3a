"""``mpcompile::update``: the op that stands for an update in a graph; clipping as ops.

Parameters, state and hyperparameters are in a table behind the handle, so no graph, no guard and no
compiler sees them. The handle is a hash of what the optimizer is, with a counter for equal ones: a
graph cached by another process must never meet another optimizer's update.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.registry import Registry
from mpcompile.runtime.grads import GradPlan
from mpcompile.runtime.guarding import guarded_plan
from mpcompile.runtime.structure import SINGLE_TENSOR, params_of
from mpcompile.runtime.tracing import step_code

if TYPE_CHECKING:
    from mpcompile.runtime.update import OptimizerUpdate, Outcome

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define("update(str handle, Tensor?[] grads, bool[] given) -> ()")
_LIBRARY.define("clip_grad_norm_(Tensor(a!)[] grads, Scalar max_norm, float norm_type) -> Tensor")
_LIBRARY.define("clip_grad_value_(Tensor(a!)[] grads, Scalar clip_value) -> ()")
_updates: Registry[OptimizerUpdate] = Registry(
    "mpcompile::update: no optimizer has the handle", "one that is gone, or for another program"
)


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
    _updates.add(update.handle, update)


def find(handle: str) -> OptimizerUpdate:
    """Return the update behind ``handle``.

    Raises:
        CaptureError: there is none; the graph belongs to an optimizer that is gone.
    """
    return _updates.find(handle)


def run_update(
    handle: str,
    grads: Sequence[torch.Tensor | None],
    given: Sequence[bool],
    plan: GradPlan | None = None,
    is_scaled: bool = False,
    factors: Sequence[float] = (),
) -> Outcome:
    """Run the update behind ``handle``.

    Args:
        handle: whose update.
        grads: one for each parameter, in the order of the groups; None leaves a parameter out.
        given: where False, the parameter's own ``.grad`` counts instead.
        plan: what happens to the gradients first.
        is_scaled: the graph left ``grads`` as the loss scale made them.
        factors: what each of ``grads`` that is there is multiplied by before all else, if anything.
    """
    update = find(handle)
    if not all(given):
        own = [param.grad for param in params_of(update.optimizer)]
        grads = [g if is_given else p for g, p, is_given in zip(grads, own, given, strict=True)]
    if factors:
        plan = replace(plan or GradPlan(), own_factors=tuple(factors))
    if update.loss_scale is not None:
        scale, optimizer = update.loss_scale, update.optimizer
        plan = guarded_plan(plan or GradPlan(), scale, optimizer, grads, is_scaled)
    return update.run(grads, plan)


def _update(handle: str, grads: Sequence[torch.Tensor | None], given: Sequence[bool]) -> None:
    run_update(handle, grads, given)


def clip_grad_norm(
    grads: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip ``grads`` in place as ``torch.nn.utils.clip_grad_norm_`` does; return their norm."""
    with torch.no_grad():
        total = torch.nn.utils.get_total_norm(grads, norm_type)
        params: Any = [_WithGrad(grad) for grad in grads]
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def clip_grad_value(grads: Sequence[torch.Tensor], clip_value: float) -> None:
    """Clip ``grads`` in place as ``torch.nn.utils.clip_grad_value_`` does."""
    params: Any = [_WithGrad(grad) for grad in grads]
    with torch.no_grad():
        torch.nn.utils.clip_grad_value_(params, clip_value)


class _WithGrad:
    """Stands for a parameter where torch only reads ``.grad``."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


_LIBRARY.impl("update", _update, "CompositeExplicitAutograd")
_LIBRARY.impl("clip_grad_norm_", clip_grad_norm, "CompositeExplicitAutograd")
_LIBRARY.impl("clip_grad_value_", clip_grad_value, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::update", lambda handle, grads, given: None, lib=_LIBRARY)
torch.library.register_fake(
    "mpcompile::clip_grad_norm_",
    lambda grads, max_norm, norm_type: torch.empty(
        (), dtype=grads[0].dtype, device=grads[0].device
    ),
    lib=_LIBRARY,
)
torch.library.register_fake("mpcompile::clip_grad_value_", lambda grads, value: None, lib=_LIBRARY)
