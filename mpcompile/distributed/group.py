"""A process group that sends float32 buckets in 16 bits.

DDP's reducer is given this group in place of its own while a step of ours runs, and keeps doing all
else that it does: order and size of buckets, unused parameters, accumulation, overlap. A
communication hook could do the same arithmetic, but can never be taken off again.

Private torch API, seen in 2.11 to 2.14: ``_create_work_from_future``; a Python subclass of
``ProcessGroup`` that overrides ``allreduce`` and ``broadcast`` is what C++ calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mpcompile.distributed import failures, wire
from mpcompile.distributed.plan import Bucket, BucketPlan
from mpcompile.distributed.residuals import Residuals
from mpcompile.errors import SyncError

_NOTHING = torch.empty(0)


@dataclass
class Sending:
    """One bucket on its way.

    Attributes:
        bucket: which.
        grads: the reducer's flat gradients, each already divided by the number of ranks.
        future: done when ``grads`` holds the mean.
        factor: what ``grads`` is multiplied by while it awaits the sum.
        largest: magnitude of the largest sum on the wire; None if nobody asked.
        wired: the sum on the wire, which is not copied into ``grads``; None if it is. ``grads``
            then holds what was sent, where that is not made from ``members``.
        members: gradients as backward made them, that ``grads`` is yet to be made from.
        started: seconds on the clock; ``arrived`` as well.
    """

    bucket: Bucket
    grads: torch.Tensor
    future: Any = None
    factor: float = 1.0
    largest: torch.Tensor | None = None
    wired: torch.Tensor | None = None
    members: tuple[torch.Tensor, ...] = ()
    started: float = field(default_factory=time.perf_counter)
    arrived: float = 0.0

    def forget(self) -> None:
        """Let go of tensors: what was received is in other hands."""
        self.grads, self.wired, self.members, self.future = _NOTHING, None, (), None


class WireGroup(dist.ProcessGroup):
    """``inner``, except that gradients go in the dtype that the plan has for their bucket."""

    def __init__(
        self,
        inner: dist.ProcessGroup,
        error_feedback: bool,
        on_first: Callable[[], None],
    ) -> None:
        """Wrap ``inner``; ``on_first`` is called when the first bucket of a backward is sent."""
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # stubs lack it
        self._inner = inner
        self._on_first = on_first
        self._plan = BucketPlan(())
        self._is_blocking = False
        self.residuals = Residuals() if error_feedback else None
        self.sums: dict[int, float] = {}
        self.sendings: list[Sending] = []
        self.num_resent = 0

    def begin(self, plan: BucketPlan, is_blocking: bool) -> None:
        """Prepare for one backward.

        Args:
            plan: the buckets to come, in order.
            is_blocking: wait for each bucket at once, because the reducer reads it before
                ``finish`` can look at it.
        """
        if plan != self._plan:
            self.sums.clear()
            if self.residuals is not None:
                self.residuals.lay_out(plan)
        self._plan = plan
        self._is_blocking = is_blocking
        self.sendings = []

    def getBackendName(self) -> str:  # torch's name
        """Return the name that torch prints."""
        return "mpcompile"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Broadcast as ``inner`` does: the reducer agrees on rebuilt buckets with it."""
        return self._inner.broadcast(tensors, opts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Start the all-reduce of the next bucket; what is no bucket goes as it is."""
        (grads,) = tensors
        position = len(self.sendings)
        if not grads.is_floating_point() or position >= len(self._plan.buckets):
            return self._inner.allreduce(tensors, opts)
        if position == 0:
            self._on_first()
        sending = self.send_bucket(grads, opts)
        if self._is_blocking:
            self._complete(sending)
        return _work_of(sending.future)

    def send_members(self, grads: Sequence[torch.Tensor], stays_on_wire: bool) -> None:
        """Start the all-reduce of the next bucket, of gradients as backward made them.

        Args:
            grads: one for each member of the bucket, in 16 bits or in the dtype of the bucket.
            stays_on_wire: hand out the sum as it is on the wire, times ``mean_factor`` the mean.
        """
        bucket, opts = self._plan.buckets[len(self.sendings)], dist.AllreduceOptions()
        if self.residuals is not None or bucket.wire is bucket.dtype:
            flat = torch.cat([grad.to(bucket.dtype).reshape(-1) for grad in grads])
            flat.div_(self.size())
            self.send_bucket(flat, opts, stays_on_wire)
            return
        sending = Sending(bucket, _NOTHING, members=tuple(grads))
        self.sendings.append(sending)
        sending.factor = self._factor(bucket, grads, self.size())
        sent = grads[0].new_empty(bucket.num_elements, dtype=bucket.wire)
        wire.cast_into(sent, grads, sending.factor / self.size())
        self._launch(sending, sent, opts, stays_on_wire)

    def send_bucket(self, grads: torch.Tensor, opts: Any, stays_on_wire: bool = False) -> Sending:
        """Start the all-reduce of the next bucket.

        Args:
            grads: its flat gradients, each already divided by the number of ranks; changed.
            opts: of the all-reduce.
            stays_on_wire: as for ``send_members``.
        """
        sending = Sending(self._plan.buckets[len(self.sendings)], grads)
        assert sending.bucket.num_elements == grads.numel(), sending.bucket
        self.sendings.append(sending)
        if sending.bucket.wire is grads.dtype:
            sending.future = self._inner.allreduce([grads], opts).get_future()
            sending.future = sending.future.then(lambda future: _arrive(sending, future))
        else:
            self._start(sending, opts, stays_on_wire)
        return sending

    def receive_bucket(self, index: int) -> torch.Tensor:
        """Wait for the bucket at ``index``; return the mean over ranks, or the sum on the wire.

        Raises:
            SyncError: it did not arrive.
        """
        sending = self.sendings[index]
        self._complete(sending)
        found = sending.grads if sending.wired is None else sending.wired
        sending.forget()
        return found

    def mean_factor(self, index: int) -> float:
        """Return what the sum on the wire at ``index``, which was received, is multiplied by."""
        return 1.0 / self.sendings[index].factor

    def _start(self, sending: Sending, opts: Any, stays_on_wire: bool) -> None:
        grads, bucket = sending.grads, sending.bucket
        if self.residuals is not None:
            grads.add_(self.residuals.of(bucket, grads))
        sending.factor = self._factor(bucket, [grads], 1)
        sent = torch.empty_like(grads, dtype=bucket.wire)
        self._cast_flat(sending, sent)
        self._launch(sending, sent, opts, stays_on_wire)

    def _cast_flat(self, sending: Sending, sent: torch.Tensor) -> None:
        """Write ``grads`` of ``sending`` times its factor to ``sent``; keep what that rounds off.

        ``grads`` stay multiplied.
        """
        grads = sending.grads.mul_(sending.factor)
        sent.copy_(grads)
        if self.residuals is not None:
            residual = self.residuals.of(sending.bucket, grads)
            torch.sub(grads, sent, out=residual).div_(sending.factor)
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # of a step that is skipped

    def _launch(self, sending: Sending, sent: torch.Tensor, opts: Any, stays_on_wire: bool) -> None:
        if stays_on_wire:
            sending.wired = sent
            if sent.dtype is not torch.float16:  # it is not sent again
                sending.grads, sending.members = _NOTHING, ()
        future = self._inner.allreduce([sent], opts).get_future()
        sending.future = future.then(lambda done: _receive(sending, sent, done))

    def _factor(self, bucket: Bucket, grads: Sequence[torch.Tensor], divisor: int) -> float:
        """Return what gradients, divided by the number of ranks, are multiplied by to be sent.

        ``grads`` have yet to be divided by ``divisor``.
        """
        factor = 1.0 / wire.post_factor(self.size())
        if bucket.wire is not torch.float16:
            return factor
        largest = self.sums.get(bucket.index)
        if largest is None:
            found = torch.stack([wire.largest_magnitude(grad) for grad in grads if grad.numel()])
            largest = self._bound_sum(found.max()) * factor / divisor
        return factor * wire.scale_for(largest)

    def _bound_sum(self, largest: torch.Tensor) -> float:
        """Ask all ranks how large a sum can become, if ``largest`` is the magnitude here."""
        largest = largest.reshape(1)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._inner.allreduce([largest], options).wait()
        return float(largest) * self.size()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def finish(self) -> None:
        """Wait for all buckets and send those again, in float32, whose sum left float16's range.

        Raises:
            SyncError: a bucket did not arrive.
        """
        if not self._is_blocking:
            for sending in self.sendings:
                self._complete(sending)

    def _complete(self, sending: Sending) -> None:
        bucket = sending.bucket
        try:
            sending.future.wait()
            if sending.largest is None:
                return
            largest = float(sending.largest)
            if not math.isfinite(largest):
                largest = self._resend(sending)
        except RuntimeError as error:
            doing = f"{len(self._plan.buckets)} (it begins with {bucket.names[0]})"
            doing = f"reducing gradient bucket {bucket.index + 1} of {doing}"
            raise SyncError(failures.describe(doing, error)) from error
        known = bucket.index in self.sums
        if math.isfinite(largest) and (largest > 0.0 or not known):
            scale = sending.factor * wire.post_factor(self.size())
            self.sums[bucket.index] = largest / scale

    def _resend(self, sending: Sending) -> float:
        """Reduce again, and return the magnitude of the largest sum on the wire.

        All ranks see the same overflow, so all come here.
        """
        self.num_resent += 1
        if sending.wired is not None:
            return self._resend_smaller(sending, sending.wired)
        if sending.members:
            sending.grads = torch.cat([grad.float().reshape(-1) for grad in sending.members])
            sending.grads.mul_(sending.factor / self.size())
        self._inner.allreduce([sending.grads]).wait()
        largest = float(wire.largest_magnitude(sending.grads))
        sending.grads.div_(sending.factor)
        if self.residuals is not None:
            self.residuals.of(sending.bucket, sending.grads).zero_()
        return largest

    def _resend_smaller(self, sending: Sending, sent: torch.Tensor) -> float:
        """Fill and reduce ``sent`` again, scaled so that no sum of finite gradients overflows.

        Ranks ask each other for the bound, as in the first step of a bucket.
        """
        factor, divisor = 1.0 / wire.post_factor(self.size()), self.size()
        grads: Sequence[torch.Tensor] = sending.members
        if not grads:
            grads, divisor = [sending.grads.div_(sending.factor)], 1
        bound = self._bound_sum(wire.largest_finite(grads)) * factor / divisor
        sending.factor = factor * wire.scale_for(bound)
        if sending.members:
            wire.cast_into(sent, grads, sending.factor / divisor)
        else:
            self._cast_flat(sending, sent)
        self._inner.allreduce([sent]).wait()
        return float(wire.largest_magnitude(sent))


def _work_of(future: Any) -> Any:
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # stubs lack it


def _arrive(sending: Sending, future: Any) -> Any:
    value = future.value()
    sending.arrived = time.perf_counter()
    return value


def _receive(sending: Sending, summed: torch.Tensor, future: Any) -> list[torch.Tensor]:
    """Turn the sum on the wire into the mean; keep the local gradients if it overflowed."""
    future.value()  # raises what went wrong
    if summed.dtype is torch.float16:
        sending.largest = wire.largest_magnitude(summed)
    if sending.wired is None:
        _widen(sending, summed)
    sending.arrived = time.perf_counter()
    return [summed if sending.wired is not None else sending.grads]


def _widen(sending: Sending, summed: torch.Tensor) -> None:
    if sending.members:
        sending.grads = torch.zeros_like(summed, dtype=torch.float32)
    grads = sending.grads
    if sending.largest is None:
        grads.copy_(summed).div_(sending.factor)
    else:
        is_finite = torch.isfinite(sending.largest)
        if grads.device.type != "cpu":  # the host must not wait for the device here
            grads.copy_(torch.where(is_finite, summed.float() / sending.factor, grads))
        elif bool(is_finite):
            grads.copy_(summed).div_(sending.factor)
