"""What one ``torch.compile(..., backend="mpcompile")`` keeps between calls.

Dynamo enters ``Session.running`` around each call, which is how a graph that arrives at the backend
finds the session that it belongs to, and how an error on the way out gets our explanation.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpcompile.capture import dynamo_api, hooks, remedies
from mpcompile.capture.assignment import read_assignment
from mpcompile.capture.ddp import GradientSync
from mpcompile.capture.first_call import warn_after_first_call
from mpcompile.capture.parameter_lists import ParameterLists
from mpcompile.capture.replay import EXACT, HALF, MOVES, Bounds, Replay
from mpcompile.capture.scaling import step_guard
from mpcompile.config import Config, is_disabled
from mpcompile.distributed.module import ModuleSync
from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.report import OverflowRecord, StepReport
from mpcompile.pipeline import build_manager
from mpcompile.runtime import dispatch
from mpcompile.runtime.drops import Drops
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.updates import Updates

_local = threading.local()

MAX_WHOLE = 5
"""How often one function is compiled anew as a whole; regions are smaller to compile anew."""

MAX_REPLAYS = 3
"""How many calls are remembered for a replay while none trains; each costs a copy of the state."""

# What AOTAutograd raises where a step cannot be compiled that eager can run, and what to say of it.
_LIMITS: Mapping[str, str] = {
    "does not currently support double backward": (
        "mpcompile: the step differentiates twice through a compiled graph (a gradient penalty, "
        "say), which torch.compile cannot do with any backend. Exclude the function that computes "
        "the penalty with torch.compiler.disable; the rest stays compiled."
    ),
    "Trying to backward through the graph a second time": (
        "mpcompile: two backward calls go through one compiled graph (a GAN step that reuses "
        "`fake`, say). With torch.compile of any backend a graph holds one backward: compute the "
        "value again for the second loss, or exclude its function with torch.compiler.disable."
    ),
    "modified by an inplace operation": (
        "mpcompile: a tensor that a later backward reads was changed in place, often parameters by "
        "an optimizer between two backward calls. torch.compile of any backend saves the tensor "
        "itself: compute the value again after the update."
    ),
}


class Session:
    """State of one compiled step.

    Attributes:
        config: the user's options, checked.
        manager: the pipeline with the user's toggles.
        report: what was done so far; ``last_report`` returns it.
        used_overrides: entries of ``keep_fp32`` and ``keep_half`` that named a node.
        updates: the fused updates of the optimizers that the step uses.
        sync: how gradients go between ranks.
        assigned: precision by region and node name that the user read from a file.
        drops: takes away gradients that nobody is to see; None if they are kept.
        loss_scale: how gradients are scaled; None if they need not be.
        watches_overflow: whether graphs are run node by node to find the first Inf or NaN.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.manager = build_manager(config)
        self.report = StepReport(config)
        self.used_overrides: set[str] = set()
        self.assigned = read_assignment(config)
        self.sync = GradientSync(config)
        self.loss_scale = _loss_scale(config, self.sync)
        fused = self.manager.is_enabled("fuse-updates")
        self.updates = Updates(config.cache_dir, fused, self.loss_scale)
        self.drops = Drops(self.updates) if config.grads == "drop" else None
        self.watches_overflow = False
        self._num_calls = 0
        self._num_prepared = 0
        self._whole = config.capture == "whole"
        self._parameters = ParameterLists()
        self._ran_whole = False
        self._dropped_later: tuple[weakref.ref[torch.Tensor], ...] = ()
        self._replays_left = MAX_REPLAYS
        self._left_to_regions: set[int | None] = set()
        self._given_up: list[dynamo_api.GraphBreak] = []
        self._constant_numbers: set[int | None] = set()
        self._whole_frames: set[int | None] = set()
        self._set_tracing = dynamo_api.tracing_patcher(config.max_recompiles, self._whole)

    def traces_whole(self) -> bool:
        """Whether the function that is being traced may become one graph."""
        if not self._whole or not dynamo_api.is_tracing():
            return False
        return not self.is_left_to_regions()

    def captures_whole(self) -> bool:
        """Whether steps become one graph where they can; the user may ask for regions."""
        return self._whole

    def is_left_to_regions(self) -> bool:
        """Whether the function that is being traced was found not to be one graph."""
        frame = dynamo_api.current_frame()
        was_whole = frame in self._whole_frames and frame not in self._left_to_regions
        if was_whole and dynamo_api.num_compilations() > MAX_WHOLE:
            self.report.add_break(
                f"not captured whole any more: compiled anew {MAX_WHOLE} times, for a list that "
                "grows in the step or a number that changes in it, say",
                dynamo_api.traced_line(),
            )
            self._left_to_regions.add(frame)
        return frame in self._left_to_regions

    def note_whole_frame(self) -> None:
        """Note that the function that is being traced is one graph with its updates."""
        self._whole_frames.add(dynamo_api.current_frame())

    def leave_to_regions(self) -> None:
        """Trace the current function in regions from now on."""
        self._left_to_regions.add(dynamo_api.current_frame())

    def keeps_numbers_free(self) -> bool:
        """Whether numbers that change stay inputs of the current function, whatever it does."""
        return dynamo_api.current_frame() not in self._constant_numbers

    def leave_numbers_constant(self) -> None:
        """Let torch decide from now on which numbers are constants of the current function."""
        self._constant_numbers.add(dynamo_api.current_frame())

    def handle_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the handle of the update of ``optimizer``."""
        return self.updates.of(optimizer).handle

    def keep_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Rely on the list of parameters of ``optimizer``."""
        self._parameters.keep(optimizer)

    def module_of(self, ddp: DistributedDataParallel) -> ModuleSync:
        """Return what sends the gradients of ``ddp``."""
        return self.sync.module_of(ddp)

    def refusal_of(self, ddp: DistributedDataParallel) -> str:
        """Return why a graph cannot take the place of ``ddp``, or nothing."""
        return self.sync.refusal_of(ddp)

    def note_refusal(self, reason: str, stack: Sequence[Any] = ()) -> None:
        """Note why we break the graph; Dynamo does not always tell, or gives the function up."""
        self.report.add_break(*dynamo_api.refused(reason, stack))

    def note_given_up(self, found: dynamo_api.GraphBreak) -> None:
        """Note that Dynamo runs a function eagerly, as a whole.

        It does so with one that raises an error, too: then the error tells, and nothing else need.
        """
        self._given_up.append(found)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the session that graphs belong to, for one call in this thread."""
        if is_disabled():
            yield
            return
        stack = _stack()
        stack.append(self)
        position = dynamo_api.num_breaks()
        self._parameters.check()
        hooks.check()
        replay = self._begin_replay()
        remedies.install_for_imported()
        restore_tracing = self._set_tracing()
        if self.loss_scale is not None:
            self.loss_scale.begin_call()
        if self.drops is not None:
            self.drops.begin_call()
        try:
            with self._dispatching(), self.sync.running(replays=replay is not None):
                yield
        finally:
            restore_tracing()
            stack.pop()
            if self.loss_scale is not None:
                self.loss_scale.end_call(failed=sys.exc_info()[1] is not None)
            if self.drops is not None:
                self.drops.end_call()
            self._finish_call(position)
            if sys.exc_info()[1] is None and replay is not None:
                self._finish_replay(replay, broke=dynamo_api.num_breaks() > position)

    def _begin_replay(self) -> Replay | None:
        """Remember where a step starts that may have to be replayed."""
        self._ran_whole = False
        wanted = self._whole and self.config.check != "off" and self._replays_left > 0
        call = dynamo_api.current_call() if wanted else None
        return None if call is None else Replay(call)

    def _finish_replay(self, replay: Replay, broke: bool) -> None:
        """Replay the step if it was one graph; evaluation before the first step does not count."""
        skipped = self.loss_scale is not None and self.loss_scale.has_skipped()
        if self._ran_whole and skipped:
            return  # the eager step would be taken; the next call is compared
        if self.sync.agree_to_replay(self._ran_whole and not broke):
            self.report.replayed += 1
            replay.compare(self._bounds(), self.sync.agree_to_replay)
        if self.config.check == "first-step":
            trained = any(region.kind is GraphKind.TRAINING for region in self.report.regions)
            self._replays_left = 0 if trained else self._replays_left - 1

    def _bounds(self) -> Bounds:
        draws = any(region.draws_random for region in self.report.regions)
        if draws and self.config.lowering == "inductor":  # it has random numbers of its own
            return MOVES
        return EXACT if self.config.dtype is torch.float32 else HALF

    def drop_later(self, params: Sequence[torch.Tensor]) -> None:
        """Have the graph that is being traced drop gradients of ``params`` after its call."""
        self._dropped_later = tuple(map(weakref.ref, params))

    def whole_run_noter(self) -> Callable[[], None]:
        """Return what is called whenever the graph that was just traced runs.

        It does not keep the session alive. With a session may go the last reference to an
        optimizer, whose end touches the list of compiled graphs: torch crashes if it is just taking
        that list down, graph by graph (seen in 2.13, at ``torch._dynamo.reset``).
        """
        known = weakref.ref(self)
        dropped, self._dropped_later = self._dropped_later, ()

        def note_run() -> None:
            session = known()
            if session is None:
                return
            session._ran_whole = True
            if dropped and session.drops is not None:
                session.drops.add([param for ref in dropped if (param := ref()) is not None])

        return note_run

    def note_overflow(self, found: OverflowRecord) -> None:
        """Keep the first overflow of a run."""
        self.report.overflow = self.report.overflow or found

    def _dispatching(self) -> AbstractContextManager[None]:
        """Send ``Optimizer.step`` to the updates; in regions to the originals if fusing is off."""
        scale = self.loss_scale
        guard = None if scale is None else step_guard(scale, self.updates)
        if self._whole or self.manager.is_enabled("fuse-updates"):
            cleared = None if self.drops is None else self.drops.note_cleared
            return dispatch.running(self.updates.run, guard, cleared)
        return dispatch.suspended(guard)

    def _finish_call(self, position: int) -> None:
        """Note what the call broke on; Dynamo leaves a context without telling of an error."""
        explained = {line for _, line in self.report.breaks}
        for found in dynamo_api.breaks_since(position):
            if found.reason != dynamo_api.UNNAMED or found.line not in explained:
                self.report.add_break(found.reason, found.line)
        if self.updates.num_prepared() != self._num_prepared:
            self._num_prepared = self.updates.num_prepared()
            self.report.updates = self.updates.records()
        self.report.syncs = self.sync.records()
        given_up, self._given_up = self._given_up, []
        error = sys.exc_info()[1]
        if error is not None:
            explain_limit(error)
            return
        for found in given_up:
            self.report.add_break(*found)
        self._num_calls += 1
        if self._num_calls == 1:
            warn_after_first_call(self.report, self.used_overrides, bool(given_up))


def _loss_scale(config: Config, sync: GradientSync) -> LossScale | None:
    """Return the loss scale of a step, or None if it has none, with a warning if it should."""
    if config.dtype is not torch.float16:
        return None
    if config.is_pass_enabled("scale-loss"):
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return LossScale(ScalePolicy.from_config(config, num_ranks), sync.agree_on)
    warnings.warn(
        "mpcompile: float16 without scale-loss: gradients below 6e-8 are lost and a step whose "
        "gradients overflow is taken. Scale the loss yourself, or use dtype='bfloat16'.",
        stacklevel=2,
    )
    return None


def explain_limit(error: BaseException) -> None:
    """Add our word to an error that torch.compile raises for what it cannot do."""
    text = str(error)
    for part, note in _LIMITS.items():
        if part in text and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _stack() -> list[Session]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Session] = _local.stack
    return stack


def current_session() -> Session | None:
    """Return the session whose call is running in this thread, or None."""
    stack = _stack()
    return stack[-1] if stack else None


def build_context(kwargs: Mapping[str, Any]) -> dynamo_api.ContextCtor:
    """Return the context constructor of one ``torch.compile`` call: its session's ``running``.

    Raises:
        ConfigError: the options are wrong. It surfaces where ``torch.compile`` is called.
    """
    session = Session(Config.from_options(kwargs.get("options"), kwargs.get("mode")))
    return session.running


def session_of(compiled: Any) -> Session | None:
    """Return the session of what ``torch.compile`` returned, or None if it is not ours."""
    owner = getattr(dynamo_api.context_ctor_of(compiled), "__self__", None)
    return owner if isinstance(owner, Session) else None
