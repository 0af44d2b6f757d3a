"""Functions that Dynamo recognises while it traces a step whole; run eagerly, they decline.

What they become in a graph is decided where Dynamo's variables are at hand (``capture``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

EPOCH = "0"
"""Guarded by every whole step: a change has them traced again (see ``expire_graphs``)."""


def expire_graphs() -> None:
    """Have every whole step traced again, because something that graphs rely on has changed."""
    global EPOCH
    EPOCH = str(int(EPOCH) + 1)


def current_epoch() -> str:
    """Return ``EPOCH``; a graph in whose trace this is called expires with it."""
    return EPOCH


def _never() -> bool:
    return False


_traces_whole: Callable[[], bool] = _never


def install(traces_whole: Callable[[], bool]) -> None:
    """Have ``is_traced_whole`` ask ``traces_whole``."""
    global _traces_whole
    _traces_whole = traces_whole


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def is_traced_whole() -> bool:
    """Whether a step of ours is being traced whole; never at run time.

    At run time nothing else may be called: Dynamo would compile it.
    """
    return torch._guards.TracingContext.try_get() is not None and _traces_whole()


def is_own_step(optimizer: Optimizer, code: str) -> bool:
    """Whether the step of identity ``code`` is the one that the class of ``optimizer`` defines."""
    step: object = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return str(id(step)) == code


def update_in_graph(optimizer: Optimizer, epoch: str) -> bool:
    """Put the update of ``optimizer`` into the graph; return whether that was done."""
    return False


def zero_grad(optimizer: Optimizer, set_to_none: bool) -> None:
    """``Optimizer.zero_grad`` as Dynamo can trace it.

    Nothing is read before it is cleared: each read would be a guard.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


def _gradients(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [param.grad for param in params if param.grad is not None]


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` as one op over all gradients."""
    grads = _gradients(parameters)
    if not grads:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.ops.mpcompile.clip_grad_norm_(grads, max_norm, norm_type)
    return total


def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` as one op over all gradients."""
    grads = _gradients(parameters)
    if grads:
        torch.ops.mpcompile.clip_grad_value_(grads, clip_value)
