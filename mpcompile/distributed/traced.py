"""What Dynamo traces of DistributedDataParallel in a step that is captured whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from mpcompile.distributed import graph_ops  # noqa: F401  # defines the ops


def average_grad(param: Any, handle: str, name: str, turn: int) -> None:
    """Replace a gradient that is new by its mean over ranks."""
    param.grad = torch.ops.mpcompile.average_gradient(param.grad, handle, name, turn)


def average_grad_in_place(param: Any, handle: str, name: str, turn: int) -> None:
    """Overwrite a gradient that was there before the step with its mean over ranks."""
    param.grad.copy_(torch.ops.mpcompile.average_gradient(param.grad, handle, name, turn))


def fetch_buffers(ddp: DistributedDataParallel, handle: str, averages: bool) -> None:
    """Overwrite buffers with those of rank 0, where stock DDP would."""
    with torch.no_grad():
        buffers = list(ddp.module.buffers())
        received = torch.ops.mpcompile.broadcast_buffers(buffers, handle, averages)
        for buffer, value in zip(buffers, received, strict=True):
            buffer.copy_(value)


class NoSync:
    """``DistributedDataParallel.no_sync`` as Dynamo can trace it."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.before = True

    def __enter__(self) -> None:
        self.before = set_sync(self.ddp, False)

    def __exit__(self, *_: object) -> None:
        set_sync(self.ddp, self.before)


def no_sync(ddp: DistributedDataParallel) -> NoSync:
    """Return what ``ddp.no_sync()`` does as a context."""
    return NoSync(ddp)


def set_sync(ddp: DistributedDataParallel, syncs: bool) -> bool:
    """Set whether backwards of ``ddp`` reduce gradients; return what was set before."""
    before = bool(ddp.require_backward_grad_sync)
    ddp.require_backward_grad_sync = syncs
    return before
