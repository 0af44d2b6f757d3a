"""The loss scale of one compiled step: it lives on the device and changes there.

No value is read on the host to decide anything, so nothing waits for the device and a CUDA graph
may hold all of it. Scales are powers of two: scaling and unscaling lose no bit.

A step is over when a call ends in which an optimizer updated. Overflows are noted per graph; an
update is skipped if what it reads is not finite, or if a graph that gave it gradients overflowed:
a clamp between the two must not hide it. Ranks that average gradients skip together, or they would
drift apart.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mpcompile.errors import CaptureError, ConfigError
from mpcompile.registry import Registry
from mpcompile.runtime import scaler_steps
from mpcompile.runtime.buffers import BufferSnapshots
from mpcompile.runtime.overflows import NotFinite, not_finite, overflows_of
from mpcompile.runtime.record import ScaleRecord
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.scale_state import FIELD_NAMES, DeviceState, Field
from mpcompile.runtime.scale_watch import ScaleWatch
from mpcompile.runtime.scaled_region import ScaledRegion
from mpcompile.runtime.structure import params_of
from mpcompile.runtime.unread_gradients import UnreadGradients

_scales: Registry[LossScale] = Registry(
    "mpcompile::loss_scale: no step has the loss scale", "one that is gone"
)
_counter = itertools.count()


class LossScale:
    """Scale, overflow flags and snapshots of one compiled step.

    Attributes:
        policy: how the scale changes.
        handle: what graphs know it by.
        buffers: what buffers held before the forward of the step.
        has_updated: an optimizer was part of the step so far.
        was_asked: the program asks by itself whether a step was skipped.
        tells_of_trouble: warn of falls in a row and such.
        names: what each source calls the gradients whose sums it hands in, in that order.
    """

    def __init__(
        self, policy: ScalePolicy, agree_on: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Make a scale; ``agree_on`` sets flags that are set on any rank."""
        self.policy = policy
        self._agree_on = agree_on
        self.handle = f"loss-scale-{next(_counter)}"
        self.buffers = BufferSnapshots()
        self._watch = ScaleWatch(self)
        self.names: list[tuple[str, ...]] = []
        self.has_updated = False
        self.was_asked = False
        self.tells_of_trouble = True
        self._unread = UnreadGradients()
        self._calls = self._updates = self._running = 0
        self._lock = threading.Lock()
        self._states: dict[torch.device, DeviceState] = {}
        self._regions: list[ScaledRegion] = []
        self._parameters = WeakTensorKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._optimizers = weakref.WeakKeyDictionary()
        _scales.add(self.handle, self)

    # --- what graphs do --------------------------------------------------------------------------

    def add_region(self) -> ScaledRegion:
        """Return a new graph's part in the scale."""
        region = ScaledRegion(self, len(self.names))
        self.names.append(())
        self._regions.append(region)
        return region

    def name_parameters(self, named: Iterable[tuple[Any, str]]) -> None:
        """Take note of what the user calls the parameters among tensors with names."""
        for tensor, name in named:
            if isinstance(tensor, torch.nn.Parameter):
                self._parameters.setdefault(tensor, name)

    def state(self, device: torch.device) -> DeviceState:
        """Return the state on ``device``; make it if need be."""
        if device not in self._states:
            with self._lock:
                self._states.setdefault(device, DeviceState(self.policy, device))
        return self._states[device]

    def factors(
        self, tangents: Sequence[Tensor], own: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return what a backward multiplies its tangents by, and what undoes it.

        If the program scales its loss by itself, in the graph by ``own``, ours makes up for the
        rest only.

        Raises:
            CaptureError: backward runs outside the compiled function, and nobody scales the loss.
        """
        state = self.state(tangents[0].device)
        if not self._running:
            self._check_scaled_outside()
            return state.one.clone(), state.one.clone()
        self.end_unread()
        scale = state.rest(state.seed(tangents, own))
        return scale, scale.reciprocal()

    def whole_factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and inverse for a graph that backward begins and ends in.

        They are the same for all graphs of a step, since an update may unscale behind them.
        """
        state, own = self.state(device), self._own_scale()
        if own == 1.0:
            return state[Field.SCALE].clone(), state[Field.INVERSE].clone()
        scale = state.rest(own)
        return scale, scale.reciprocal()

    def _own_scale(self) -> float:
        """Return by how much the program scales losses itself in graphs; the least of all."""
        known = [region.own_scale for region in self._regions if region.own_scale is not None]
        return min(known, default=1.0)

    def _check_scaled_outside(self) -> None:
        if self.policy.is_static and self.policy.initial == 1.0:
            return
        raise CaptureError(
            "float16: backward runs outside the compiled function, so the optimizer does too and "
            "cannot be told to skip a step whose gradients overflowed. Compile the whole step with "
            "backward() and opt.step() in it, or use dtype='bfloat16', which needs no scaling; or "
            "scale the loss yourself (torch.amp.GradScaler) and say options={'loss_scale': 1}."
        )

    def inverse(self, device: torch.device) -> Tensor:
        """Return what unscales gradients that a graph has left scaled for an update."""
        state, own = self.state(device), self._own_scale()
        return state[Field.INVERSE] if own == 1.0 else state.rest(own).reciprocal()

    def note(self, source: int, sums: Sequence[Tensor]) -> None:
        """Note whether the gradients with these ``sums`` overflowed."""
        found = self.state(sums[0].device).note(source, NotFinite(not_finite(sums)))
        for region in self._regions:
            if region.source == source and region.flag is not None:
                region.flag.logical_or_(found)
                self._unread.add(source, self._calls, region.owners)

    def skip_in_graph(self, source: int, sums: Sequence[Tensor]) -> Tensor:
        """Return a flag: whether an update in a graph, which reads ``sums``, is to be left out."""
        device = sums[0].device
        found = self.state(device).note(source, NotFinite(not_finite(sums)))
        skip = self._agreed(torch.stack([found, *self._flags(device, None)]).any())
        for region in self._regions:
            if region.source == source and region.flag is not None:
                region.flag.copy_(skip)
        return skip

    def skipping(self, device: torch.device) -> Tensor:
        """Return a flag: whether an update of this step was skipped so far."""
        return self.state(device)[Field.SKIPPING] > 0

    # --- what updates do -------------------------------------------------------------------------

    def skip_for(
        self,
        optimizer: torch.optim.Optimizer,
        grads: Sequence[Tensor | None],
        found: NotFinite | None = None,
    ) -> Tensor:
        """Return a flag: whether ``optimizer`` is to leave out the step that reads ``grads``.

        Buffers that the step's forward wrote to are put back if so, without a wait. ``found`` is
        what is not finite among the gradients that are there; None if nobody has looked.
        """
        groups = optimizer.param_groups
        params = frozenset(id(param) for group in groups for param in group["params"])
        present = [grad for grad in grads if grad is not None]
        device = present[0].device if present else torch.device("cpu")
        flags = self._flags(device, params)
        if present:
            found = found or NotFinite(overflows_of(present))
            flags.append(self.state(device).note(self._source_of(optimizer, grads), found))
        skip = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
        skip = self._agreed(skip)
        self.end_update(skip, params)
        return skip

    def keep_buffers(self, optimizer: torch.optim.Optimizer, buffers: Sequence[Tensor]) -> None:
        """Keep what ``buffers`` hold, which forwards write that are no graphs of ours.

        They go back if the step of ``optimizer`` is left out.
        """
        self.buffers.keep(buffers, frozenset(map(id, params_of(optimizer))))

    def note_step_of_program(self, optimizer: torch.optim.Optimizer, left_out: Tensor) -> None:
        """Note whether the program has left out a step of ``optimizer`` for an overflow."""
        self.state(left_out.device).note_elsewhere(left_out)
        self.end_update(left_out, frozenset(map(id, params_of(optimizer))))

    def end_update(self, skip: Tensor, params: frozenset[int] | None) -> None:
        """Note that an update of ``params`` (None: any) has been decided on."""
        self._updates += 1
        self.has_updated = True
        self._unread.forget()
        self.state(skip.device)[Field.SKIPPING].logical_or_(skip)
        self.buffers.settle(skip, params)

    def _agreed(self, skip: Tensor) -> Tensor:
        """Return whether any rank skips; the scales of all fall with what one of them found."""
        if self._agree_on is None:
            return skip
        state = self.state(skip.device)
        skip, found = self._agree_on(torch.stack([skip, state[Field.FOUND] > 0]))
        state.note_elsewhere(found)
        return skip

    def _flags(self, device: torch.device, params: frozenset[int] | None) -> list[Tensor]:
        return [
            region.flag.to(device, non_blocking=True)
            for region in self._regions
            if region.flag is not None and not region.updates and region.feeds(params)
        ]

    def _source_of(self, optimizer: torch.optim.Optimizer, grads: Sequence[Tensor | None]) -> int:
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = len(self.names)
            self.names.append(())
        source = self._optimizers[optimizer]
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if len(self.names[source]) != len(present):
            kind = type(optimizer).__name__
            params = params_of(optimizer)
            self.names[source] = tuple(
                self._parameters.get(params[i], f"parameter {i} of {kind}") for i in present
            )
        return source

    # --- what calls do ---------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Note that a call of the compiled function begins."""
        self._watch.poll()
        scaler_steps.begin(self.note_step_of_program)
        self._running += 1
        self._calls += 1
        self._updates = 0

    def end_call(self, failed: bool) -> None:
        """Note that a call ends, and with it a step if an optimizer updated or none ever did.

        So it does if the program has thrown its gradients away.
        """
        scaler_steps.end()
        self._running -= 1
        if failed or self._running:
            return
        is_step = self._updates > 0 or not self.has_updated
        if is_step or self._unread.are_gone(self._calls + 1):
            self._end_step()

    def end_unread(self, replaced: Collection[int] = ()) -> None:
        """End a step of earlier calls whose gradients nothing has read, nor will."""
        if self._unread.are_gone(self._calls, replaced):
            self._end_step()

    def _end_step(self) -> None:
        for state in self._states.values():
            if not self._updates:
                self.buffers.settle(state[Field.FOUND] > 0, None)
            state.advance(self.policy)
        flags = [region.flag for region in self._regions if region.flag is not None]
        if flags:
            torch._foreach_zero_(flags)
        self._unread.forget()
        self.buffers.forget()
        if self.tells_of_trouble:
            self._watch.copy()
            self._watch.poll()

    def has_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device."""
        return any(bool(state[Field.SKIPPED]) for state in self._states.values())

    def skipped(self) -> Tensor:
        """Return a flag on the device: the last step overflowed, its updates were skipped."""
        self.was_asked = True
        flags = [state[Field.SKIPPED] > 0 for state in self._states.values()]
        if not flags:
            return torch.zeros((), dtype=torch.bool)
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any()

    # --- checkpoints and reports -----------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the state by device; this waits for the device."""
        return {
            str(device): dict(zip(FIELD_NAMES, state.values.tolist(), strict=True))
            for device, state in self._states.items()
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Take over what ``state_dict`` gave.

        Raises:
            ConfigError: it is not from ``state_dict`` of this version.
        """
        for device, numbers in saved.items():
            missing = [name for name in FIELD_NAMES if name not in numbers]
            if missing:
                raise ConfigError(
                    f"load_state_dict: the loss scale of {device} lacks {', '.join(missing)}. Load "
                    "what mpcompile.state_dict(step) returned, unchanged."
                )
            values = torch.tensor([float(numbers[name]) for name in FIELD_NAMES])
            self.state(torch.device(device)).values.copy_(values)

    def record(self) -> ScaleRecord | None:
        """Return the state for reports, or None if no graph was scaled; waits for the device."""
        for values in self.snapshot():
            return self.read(values)
        return None

    def read(self, values: Tensor) -> ScaleRecord:
        """Return what ``values``, a copy of the state of a device, say."""
        now = dict(zip(Field, values.tolist(), strict=True))
        return ScaleRecord(
            scale=now[Field.SCALE],
            policy=str(self.policy),
            overflows=int(now[Field.OVERFLOWS]),
            falls=int(now[Field.FALLS]),
            at_floor=bool(now[Field.AT_FLOOR]),
            first=self._name_of(now[Field.SOURCE], now[Field.POSITION]),
            own_scale=max(now[Field.SEED], self._own_scale()),
        )

    def snapshot(self) -> list[Tensor]:
        """Return the state of each device, to be copied by whoever watches."""
        return [state.values.detach() for state in self._states.values()]

    def _name_of(self, source: float, position: float) -> str:
        names = self.names[int(source)] if 0 <= source < len(self.names) else ()
        return names[int(position)] if position < len(names) else ""


def find_scale(handle: str) -> LossScale:
    """Return the scale behind ``handle``.

    Raises:
        CaptureError: there is none; the graph belongs to a step that is gone.
    """
    return _scales.find(handle)
