"""The ops through which a captured step talks to other ranks.

``average_gradient`` is what capture puts behind each gradient of a DistributedDataParallel module:
by itself one float32 all-reduce, slow but never wrong. The pass ``bucket-allreduce`` gathers these
into ``send_bucket`` and ``receive_bucket``. The module is behind a handle, so that no process group
enters a graph; each send takes the result of the one before it, so that no compiler changes their
order, in which ranks must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpcompile.distributed.plan import SumOnWire
from mpcompile.registry import Registry

if TYPE_CHECKING:
    from mpcompile.distributed.module import ModuleSync

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
for _schema in (
    "average_gradient(Tensor grad, str handle, str name, int turn) -> Tensor",
    "send_bucket(str handle, int index, Tensor[] grads, ScalarType dtype, Tensor? after) -> Tensor",
    "receive_bucket(str handle, int index, int size, Tensor sent, Tensor[] kept) -> Tensor",
    "broadcast_buffers(Tensor[] buffers, str handle, bool averages) -> Tensor[]",
):
    # The host takes part each time: a replay would send with the scales of when it was captured.
    _LIBRARY.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
_modules: Registry[ModuleSync] = Registry(
    "mpcompile::average_gradient: no DistributedDataParallel has the handle", "one that is gone"
)


def register(module: ModuleSync) -> str:
    """Return the handle that ops know ``module`` by; it is counted up, never used again."""
    global _num_handles
    _num_handles += 1
    handle = f"ddp-{_num_handles}"
    _modules.add(handle, module)
    return handle


_num_handles = 0


def find(handle: str) -> ModuleSync:
    """Return the module behind ``handle``.

    Raises:
        CaptureError: there is none; the graph belongs to a module that is gone.
    """
    return _modules.find(handle)


def mean_factors(sums: Sequence[SumOnWire | None]) -> list[float]:
    """Return what gradients of each bucket are multiplied by: one where they are on no wire."""
    return [1.0 if item is None else find(item.handle).mean_factor(item.bucket) for item in sums]


def _average_gradient(grad: Tensor, handle: str, name: str, turn: int) -> Tensor:
    """Return the mean of ``grad`` over ranks."""
    return find(handle).average(grad)


def _send_bucket(
    handle: str, index: int, grads: Sequence[Tensor], dtype: torch.dtype, after: Tensor | None
) -> Tensor:
    """Start the reduction of a bucket; return an empty tensor that stands for it.

    It has the ``dtype`` that ``receive_bucket`` gives: that of the means, or of the wire.
    """
    find(handle).send(index, grads, dtype)
    return grads[0].new_empty(0, dtype=dtype)


def _receive_bucket(
    handle: str, index: int, size: int, sent: Tensor, kept: Sequence[Tensor]
) -> Tensor:
    """Wait for a bucket; return the mean over ranks of its gradients, one behind the other.

    If the dtype is the wire's, that is the sum as it is there, which ``mean_factors`` completes.
    ``kept`` are the gradients that may have to be sent again: a compiler that knows of no reader
    would give their memory away.
    """
    return find(handle).receive(index)


def _broadcast_buffers(buffers: Sequence[Tensor], handle: str, averages: bool) -> list[Tensor]:
    """Return what rank 0 has for ``buffers``, where stock DDP would ask it."""
    return find(handle).broadcast(buffers, averages)


_LIBRARY.impl("average_gradient", _average_gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("send_bucket", _send_bucket, "CompositeExplicitAutograd")
_LIBRARY.impl("receive_bucket", _receive_bucket, "CompositeExplicitAutograd")
_LIBRARY.impl("broadcast_buffers", _broadcast_buffers, "CompositeExplicitAutograd")
torch.library.register_fake(
    "mpcompile::average_gradient",
    lambda grad, handle, name, turn: torch.empty_like(grad),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "mpcompile::send_bucket",
    lambda handle, index, grads, dtype, after: grads[0].new_empty(0, dtype=dtype),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "mpcompile::receive_bucket",
    lambda handle, index, size, sent, kept: sent.new_empty(size),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "mpcompile::broadcast_buffers",
    lambda buffers, handle, averages: [torch.empty_like(buffer) for buffer in buffers],
    lib=_LIBRARY,
)
