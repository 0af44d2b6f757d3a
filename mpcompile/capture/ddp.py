"""DistributedDataParallel in a compiled step: reach its forward, send its gradients in 16 bits.

Dynamo leaves the wrapper to Python, which calls the module inside. There is one place between the
two, ``_run_ddp_forward``. A permanent dispatcher stands in it: where a step of ours runs, the
module is called from a frame of this file, so that Dynamo compiles modules of torch too (it skips
``nn.Sequential.forward`` as such, and the model would run eagerly in float32), and the gradients of
the backward to come are sent as the options say. Elsewhere the original runs. Another stands in
``_pre_forward``, where ranks are told that this one goes in regions. A step that is captured whole
meets neither.

Private torch API beside that of ``mpcompile.distributed.ddp_api``, seen in 2.11 to 2.14:
``torch._dynamo.eval_frame.skip_code``; ``get_eval_frame_callback``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.nn.parallel import DistributedDataParallel

from mpcompile.config import Config
from mpcompile.distributed import ddp_api, failures
from mpcompile.distributed.coordination import Coordinator
from mpcompile.distributed.graph_sync import GraphSync
from mpcompile.distributed.module import ModuleSync, SyncSettings
from mpcompile.distributed.record import SyncRecord
from mpcompile.lowering import Compiled
from mpcompile.runtime.stand_ins import expire_graphs

_PASS = "bucket-allreduce"
_local = threading.local()
_install_lock = threading.Lock()
_original = DistributedDataParallel._run_ddp_forward
_original_pre = DistributedDataParallel._pre_forward
_awaiting_backward: weakref.WeakKeyDictionary[DistributedDataParallel, ModuleSync] = (
    weakref.WeakKeyDictionary()
)


class GradientSync:
    """What one compiled step does to the DDP modules that it calls."""

    def __init__(self, config: Config) -> None:
        self._settings = SyncSettings(
            wire=config.wire_dtype or config.dtype,
            error_feedback=config.error_feedback,
            check_sync=config.check_sync,
            refusal="" if config.is_pass_enabled(_PASS) else f"{_PASS} is disabled",
        )
        self._coordinator = Coordinator() if config.capture == "whole" else None
        self._is_warning_due = config.wire_dtype not in (None, torch.float32)
        self._pending: list[Mapping[str, Any]] = []
        self._modules: weakref.WeakKeyDictionary[DistributedDataParallel, ModuleSync] = (
            weakref.WeakKeyDictionary()
        )
        self._relied: weakref.WeakKeyDictionary[DistributedDataParallel, object] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def running(self, replays: bool = False) -> Iterator[None]:
        """Have the DDP modules that are called in this thread go our way.

        Args:
            replays: whether the step may be run again, eagerly, to compare.

        Raises:
            SyncError: a parameter differs between ranks after the call.
        """
        if not dist.is_initialized():
            yield
            return
        _install()
        self._check_relied()
        if self._coordinator is not None:
            self._coordinator.begin_call(replays)
        stack = _stack()
        self._warn_if_inside(is_outermost=not stack)
        stack.append(self)
        try:
            yield
        finally:
            stack.pop()
            self._finish_call(sys.exc_info()[1])

    def _finish_call(self, error: BaseException | None) -> None:
        if error is not None:
            failures.note(error)
        for module in self._modules.values():
            if error is not None:
                module.restore()
            else:
                module.check()

    def _warn_if_inside(self, is_outermost: bool) -> None:
        if is_outermost and self._is_warning_due and ddp_api.is_inside_forward():
            self._warn("the compiled module is inside DistributedDataParallel; compile the step")

    def _warn(self, reason: str) -> None:
        self._is_warning_due = False
        warnings.warn(
            "mpcompile: gradients go over the wire as stock DDP sends them, not as wire_dtype "
            f"asks: {reason}.",
            stacklevel=2,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def announce(self, ddp: DistributedDataParallel) -> None:
        """Tell the other ranks that a forward of ``ddp`` begins, in regions.

        Raises:
            SyncError: another rank runs a graph, or is gone.
        """
        if self._coordinator is None or not ddp_api.communicates(ddp):
            return
        if not (self._settings.refusal or ddp_api.refusal(ddp)):
            self._coordinator.announce_regions(ddp)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def prepare(self, ddp: DistributedDataParallel) -> None:
        """Get ready for the backward of a forward of ``ddp`` that starts now.

        Raises:
            SyncError: ranks disagree.
        """
        module = self.module_of(ddp)
        module.prepare()
        if module.refusal and self._is_warning_due:
            self._warn(module.refusal)
        _awaiting_backward[ddp] = module

    def module_of(self, ddp: DistributedDataParallel) -> ModuleSync:
        """Return what sends the gradients of ``ddp``."""
        module = self._modules.get(ddp)
        if module is None:
            module = self._modules[ddp] = ModuleSync(ddp, self._settings)
            if self._pending:
                module.load_state_dict(self._pending.pop(0))
        return module

    # --- in a graph that holds the whole step ----------------------------------------------------

    def refusal_of(self, ddp: DistributedDataParallel) -> str:
        """Return why a graph cannot take the place of ``ddp``; rely on the answer if it can."""
        found = self._settings.refusal or ddp_api.graph_refusal(ddp)
        if not found:
            self._relied[ddp] = ddp_api.graph_state(ddp)
        return found

    def _check_relied(self) -> None:
        """Expire all graphs if a module has become another than when it was traced."""
        for ddp, known in list(self._relied.items()):
            if ddp_api.graph_state(ddp) != known:
                del self._relied[ddp]
                expire_graphs()

    def offer(self, syncs: Sequence[GraphSync]) -> bool:
        """Return whether all ranks agree to a graph that does what ``syncs`` say.

        Raises:
            SyncError: another rank runs another graph already, or is gone.
        """
        return self._coordinator is None or self._coordinator.offer(syncs)

    def agree_to_replay(self, is_ready: bool) -> bool:
        """Return whether all ranks are ready to run the step again, eagerly.

        Raises:
            SyncError: a rank is gone.
        """
        return (
            is_ready if self._coordinator is None else self._coordinator.agree_to_replay(is_ready)
        )

    def in_graph(self, function: Compiled, syncs: Sequence[GraphSync]) -> Compiled:
        """Return ``function``, a graph that does what ``syncs`` say, with what goes around it."""

        def run(*args: Any) -> Any:
            if self._coordinator is not None:
                self._coordinator.confirm(syncs)
            for sync in syncs:
                sync.module.begin_graph(sync.plan)
            outputs = function(*args)
            for sync in syncs:
                sync.module.end_graph(sync.plan.num_turns)
            return outputs

        return run if syncs else function

    # --- for all ---------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def agree_on(self, flag: torch.Tensor) -> torch.Tensor:
        """Return ``flag``, of bools, set where it is on any rank of any module's group.

        For a decision that ranks must take together, such as to skip a step; all ranks must ask.
        Ranks that do not average at the moment, under ``no_sync`` or ``join``, decide alone.

        Raises:
            SyncError: a rank is gone.
        """
        for module in self._modules.values():
            flag = module.agree_on(flag)
        return flag

    def records(self) -> list[SyncRecord]:
        """Return what each module sends."""
        return [module.record() for module in self._modules.values()]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each module, in the order in which they were first called.

        What was loaded for modules that were not called yet comes last, as it is.
        """
        known = [module.state_dict() for module in self._modules.values()]
        return [*known, *map(dict, self._pending)]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take what ``state_dict`` gave, now or when the modules are first called."""
        self._pending = list(state)
        for module in self._modules.values():
            if self._pending:
                module.load_state_dict(self._pending.pop(0))


def _stack() -> list[GradientSync]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[GradientSync] = _local.stack
    return stack


def _current() -> GradientSync | None:
    """Return whose step runs in this thread; code excluded from compilation is not part of it."""
    stack = _stack()
    return stack[-1] if stack and callable(eval_frame.get_eval_frame_callback()) else None


def _install() -> None:
    """Put the dispatchers into the class; once."""
    with _install_lock:
        if DistributedDataParallel._run_ddp_forward is _original:
            DistributedDataParallel._run_ddp_forward = _run_ddp_forward  # type: ignore[method-assign]
            DistributedDataParallel._pre_forward = _pre_forward  # type: ignore[method-assign]


def _pre_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    sync = None if self._use_python_reducer else _current()
    if sync is not None:
        sync.announce(self)
    return _original_pre(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's


def _run_ddp_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self._use_python_reducer:  # Dynamo traces through the wrapper
        return _original(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
    _end_previous(self)
    sync = _current()
    if sync is None:
        return _original(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
    sync.prepare(self)
    return _call(self.module, inputs, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _end_previous(ddp: DistributedDataParallel) -> None:
    """Undo what a forward of ours prepared for a backward that never came."""
    previous = _awaiting_backward.pop(ddp, None)
    if previous is not None:
        previous.restore()


def _call(self: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module; ``self``, so that reports name what is in it by its path in the module."""
    return self(*inputs, **kwargs)


# Frames that Dynamo must not compile on their own; it does compile ``_call``.
skip_code(_run_ddp_forward.__code__)
skip_code(_pre_forward.__code__)
skip_code(_current.__code__)
skip_code(_stack.__code__)
