"""One DistributedDataParallel module under a compiled step: when its gradients go our way.

A forward of ours that will be followed by a reducing backward puts our process group into the
reducer, and the end of that backward, or of the call, takes it out. So every other use of the
instance is stock.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from mpcompile.distributed import ddp_api, failures, graph_ops
from mpcompile.distributed.agreement import agree_on, compare_parameters, compare_plans
from mpcompile.distributed.group import WireGroup
from mpcompile.distributed.plan import Bucket, BucketPlan
from mpcompile.distributed.record import BucketTimes, SyncRecord
from mpcompile.errors import CaptureError, SyncError

_IN_GRAPH = "the graph of the whole step"
_IN_REDUCER = "mpcompile, in the place of the reducer's process group"
_DELAYED = (
    "DistributedDataParallel({}): delay_all_reduce_named_params reduces gradients in a hook of one "
    "parameter, but a compiled backward hands out all gradients at its end, so others would be "
    "reduced before they are there. Leave it out: mpcompile chooses its buckets by itself."
)


@dataclass(frozen=True)
class SyncSettings:
    """What the user asked for.

    Attributes:
        wire: dtype that float32 gradients are sent in.
        error_feedback: keep what the cast rounds off.
        check_every: compare parameters after every so many reductions; 0 for never, None for after
            the first only.
    """

    wire: torch.dtype
    error_feedback: bool = False
    check_sync: str | int = "first-step"
    refusal: str = ""

    def is_check_due(self, num_backwards: int) -> bool:
        """Whether parameters are compared after so many reductions."""
        if isinstance(self.check_sync, int):
            return num_backwards % self.check_sync == 0
        return self.check_sync == "first-step" and num_backwards == 1

    @property
    def lines(self) -> tuple[str, ...]:
        """What ranks must agree on, as text."""
        return (f"error_feedback: {self.error_feedback}", f"check_sync: {self.check_sync}")


class ModuleSync:
    """Sends the gradients of one module, checks that ranks agree, and keeps the record."""

    def __init__(self, ddp: DistributedDataParallel, settings: SyncSettings) -> None:
        self._ddp = weakref.ref(ddp)
        self._settings = settings
        self._group = WireGroup(ddp.process_group, settings.error_feedback, self._expect_end)
        self._plan = BucketPlan(())
        self._reducer_plan = BucketPlan(())
        self._plan_version: object = None
        self._is_in_graph = False
        self._is_installed = False
        self._is_check_due = False
        self._averages = False
        self._num_backwards = 0
        self._wait_s = 0.0
        self.refusal = ""
        self.handle = graph_ops.register(self)

    def prepare(self) -> None:
        """Get ready for the backward of a forward that starts now.

        Raises:
            CaptureError: a compiled backward would send gradients that are yet to be computed.
            SyncError: ranks disagree.
        """
        ddp = self._module()
        if ddp_api.delays_reductions(ddp):
            raise CaptureError(_DELAYED.format(type(ddp.module).__name__))
        self.check()
        if torch.is_grad_enabled():
            self._averages = ddp_api.keeps_ranks_together(ddp)
        self.refusal = self._settings.refusal or ddp_api.refusal(ddp)
        if self.refusal or not ddp_api.will_reduce(ddp):
            self.restore()
            return
        version = ddp_api.plan_version(ddp)
        if version != self._plan_version:
            buckets = ddp_api.read_buckets(ddp, self._settings.wire)
            self._reducer_plan = BucketPlan(buckets, self._settings.lines)
            compare_plans(self._reducer_plan, ddp.process_group, ddp.device)
            self._plan_version = version
        self._plan = self._reducer_plan
        self._is_in_graph = False
        self._group.begin(self._plan, ddp_api.is_read_early(ddp))
        ddp_api.set_reducer_group(ddp, self._group)
        self._is_installed = True

    def restore(self) -> None:
        """Give the reducer its own group back."""
        ddp = self._ddp()
        if self._is_installed and ddp is not None:
            ddp_api.set_reducer_group(ddp, ddp.process_group)
        self._is_installed = False

    def check(self) -> None:
        """Compare parameters across ranks, if a backward has made that due.

        Raises:
            SyncError: a parameter differs.
        """
        if self._is_check_due:
            self._is_check_due = False
            ddp = self._module()
            when = f"after {self._num_backwards} reductions of gradients"
            compare_parameters(list(ddp_api.named_parameters(ddp)), ddp.process_group, when)

    # --- in a graph that holds the whole step ----------------------------------------------------

    def plan(self, buckets: Sequence[Bucket]) -> BucketPlan:
        """Return the plan of a graph that sends ``buckets``."""
        return BucketPlan(tuple(buckets), self._settings.lines)

    @property
    def wire(self) -> torch.dtype:
        """What float32 gradients are sent as."""
        return self._settings.wire

    @property
    def capacities(self) -> tuple[int, int]:
        """Bytes of gradients in the first bucket, and in each later one."""
        return ddp_api.bucket_bytes(self._module())

    @property
    def num_ranks(self) -> int:
        """How many ranks average."""
        return self._module().process_group.size()

    @property
    def words_group(self) -> dist.ProcessGroup:
        """A group of the same ranks that moves CPU tensors."""
        return ddp_api.words_group(self._module())

    @property
    def keeps_residuals(self) -> bool:
        """Whether what the cast rounds off is kept for the next step."""
        return self._settings.error_feedback

    def begin_graph(self, plan: BucketPlan) -> None:
        """Get ready for a graph that sends ``plan`` by itself.

        Raises:
            SyncError: a parameter differs between ranks.
        """
        self.check()
        self.restore()
        self.refusal = ""
        self._averages = bool(plan.buckets)
        self._is_in_graph = True
        if plan.buckets:
            self._plan = plan
            self._wait_s = 0.0
            self._group.begin(plan, is_blocking=False)

    def end_graph(self, turns: int) -> None:
        """Note that the graph has run, in which gradients were reduced ``turns`` times."""
        for _ in range(turns):
            self._num_backwards += 1
            self._is_check_due |= self._settings.is_check_due(self._num_backwards)

    def average(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks of one gradient, sent as it is."""
        mean = grad / self._module().process_group.size()
        try:
            dist.all_reduce(mean, group=self._module().process_group)
        except RuntimeError as error:
            raise SyncError(failures.describe("reducing a gradient", error)) from error
        return mean

    def send(self, index: int, grads: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Start the reduction of the bucket at ``index``, which holds ``grads``.

        It is handed out in ``dtype``; in that of the wire it is a sum, which ``mean_factor`` makes
        the mean.
        """
        assert index == len(self._group.sendings), "buckets are sent in the order of the plan"
        self._group.send_members(grads, dtype is not self._plan.buckets[index].dtype)

    def receive(self, index: int) -> torch.Tensor:
        """Return the mean over ranks of the bucket at ``index``, or its sum on the wire.

        Raises:
            SyncError: it did not arrive.
        """
        self._wait_s = self._wait_s or time.perf_counter()
        return self._group.receive_bucket(index)

    def mean_factor(self, index: int) -> float:
        """Return what the sum on the wire of the bucket at ``index`` is multiplied by to be a mean.

        Known when the bucket was received, until the next graph begins.
        """
        return self._group.mean_factor(index)

    def broadcast(self, buffers: Sequence[torch.Tensor], averages: bool) -> list[torch.Tensor]:
        """Return the buffers of rank 0, if stock DDP would fetch them now.

        Args:
            buffers: what this rank has.
            averages: whether the forward that begins is followed by a reducing backward.
        """
        copies = [buffer.clone() for buffer in buffers]
        try:
            ddp_api.broadcast_buffers(self._module(), copies, averages)
        except RuntimeError as error:
            raise SyncError(failures.describe("broadcasting buffers", error)) from error
        return copies

    # --- what ranks decide together --------------------------------------------------------------

    def agree_on(self, flag: torch.Tensor) -> torch.Tensor:
        """Return ``flag``, set where it is on any rank that averages with this one."""
        ddp = self._module()
        if not self._averages or ddp.process_group.size() == 1:
            return flag
        there = flag.to(ddp.device, non_blocking=True)
        return agree_on(there, ddp.process_group).to(flag.device)

    def record(self) -> SyncRecord:
        """Return what is sent, for reports."""
        ddp = self._module()
        name, size = type(ddp.module).__name__, ddp.process_group.size()
        if self.refusal:
            return SyncRecord(name, size, f"stock DDP: {self.refusal}")
        sendings = self._group.sendings
        start = sendings[0].started if sendings else 0.0
        times = [
            BucketTimes((item.started - start) * 1e3, (item.arrived - start) * 1e3)
            for item in sendings
        ]
        return SyncRecord(
            module=name,
            num_ranks=size,
            sender=_IN_GRAPH if self._is_in_graph else _IN_REDUCER,
            buckets=self._plan.buckets,
            times=tuple(times),
            wait_ms=(self._wait_s - start) * 1e3,
            num_backwards=self._num_backwards,
            num_resent=self._group.num_resent,
            error_feedback=self._settings.error_feedback,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on: this rank's residuals by parameter, on the CPU."""
        owed = {} if self._group.residuals is None else self._group.residuals.state()
        return {
            "rank": self._rank(),
            "residuals": {name: residual.cpu() for name, residual in owed.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave on this rank; what another rank owes is left out."""
        if self._group.residuals is None:
            return
        if state["rank"] != self._rank():
            warnings.warn(
                f"mpcompile: rank {self._rank()} was given the error feedback of rank "
                f"{state['rank']} and starts without any. Save mpcompile.state_dict(step) on every "
                "rank, to a file of its own, and load each on its rank.",
                stacklevel=2,
            )
            return
        self._group.residuals.load(state["residuals"])

    def _rank(self) -> int:
        return self._module().process_group.rank()

    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "a module that is gone has no steps"
        return ddp

    def _expect_end(self) -> None:
        """Called when the first bucket is sent: have ``_end`` called when backward is through."""
        Variable._execution_engine.queue_callback(self._end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def _end(self) -> None:
        self._wait_s = time.perf_counter()
        self._group.finish()
        self.restore()
        self._num_backwards += 1
        self._is_check_due = self._settings.is_check_due(self._num_backwards)
