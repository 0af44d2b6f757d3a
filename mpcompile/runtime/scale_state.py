"""The numbers of a loss scale on one device, and how they change there."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from mpcompile.runtime.overflows import NotFinite
from mpcompile.runtime.scale_policy import ScalePolicy


class Field(enum.IntEnum):
    """What the elements of a device's state are."""

    SCALE = 0
    INVERSE = 1
    GOOD = 2  # steps without overflow since the scale last changed
    PATIENCE = 3  # overflows until the scale halves
    FALLS = 4  # overflowing steps in a row that halved the scale
    FOUND = 5  # an overflow was found in this step
    SKIPPED = 6  # an update of the last step was skipped, or should be
    SOURCE = 7  # where the first overflow of the last overflowing step was found
    POSITION = 8  # its position among the names of the source
    SEED = 9  # power of two by which the program scales its loss itself
    AT_FLOOR = 10  # the last overflow met the scale at its floor
    OVERFLOWS = 11  # steps that overflowed so far
    SKIPPING = 12  # an update of this step was skipped: what follows it writes nothing


FIELD_NAMES = tuple(name.name.lower() for name in Field)


def real_tensors() -> contextlib.ExitStack:
    """Make tensors that live on, although a graph may be traced at the moment."""
    stack = contextlib.ExitStack()
    for context in (
        unset_fake_temporarily(),
        _disable_current_modes(),
        torch.inference_mode(False),
    ):
        stack.enter_context(context)
    return stack


class DeviceState:
    """The numbers of one device."""

    def __init__(self, policy: ScalePolicy, device: torch.device) -> None:
        with real_tensors():
            first = policy.initial, 1.0 / policy.initial, 0, policy.hysteresis, 0, 0, 0, -1, 0, 1
            values = [*first, 0, 0, 0]
            self.values = torch.tensor(values, dtype=torch.float32, device=device)
            self.one = torch.ones((), device=device)
            self.fields = [self.values[name] for name in Field]

    def __getitem__(self, name: Field) -> Tensor:
        return self.fields[name]

    def note(self, source: int, overflowed: NotFinite) -> Tensor:
        """Note which of the names of ``source`` overflowed; return whether any did."""
        found = overflowed.flags.any()
        first = found & (self[Field.FOUND] == 0)
        position = overflowed.first()
        self[Field.SOURCE].copy_(torch.where(first, source, self[Field.SOURCE]))
        self[Field.POSITION].copy_(torch.where(first, position, self[Field.POSITION]))
        self[Field.FOUND].logical_or_(found)
        return found

    def note_elsewhere(self, found: Tensor) -> None:
        """Note that another rank found an overflow; only that rank knows where."""
        unseen = found & (self[Field.FOUND] == 0)
        self[Field.SOURCE].copy_(torch.where(unseen, -1.0, self[Field.SOURCE]))
        self[Field.FOUND].logical_or_(found)

    def seed(self, tangents: Sequence[Tensor], own: Sequence[float] = ()) -> Tensor:
        """Return the power of two in the gradients of losses: the program may scale by itself.

        It multiplies each by one of ``own``, if there are any, where it goes.
        """
        factors = own or (1.0,) * len(tangents)
        losses = [
            tangent.detach().abs().float() * factor
            for tangent, factor in zip(tangents, factors, strict=True)
            if tangent.dim() == 0 and tangent.is_floating_point()
        ]
        if losses:
            largest = torch.stack(losses).amax()
            power = torch.ldexp(self.one, (torch.frexp(largest).exponent - 1).clamp_(0, 126))
            self[Field.SEED].copy_(torch.where(largest.isfinite(), power, self.one))
        return self[Field.SEED]

    def rest(self, seed: Tensor | float) -> Tensor:
        """Return what is left of the scale behind ``seed``, by which the program scales.

        A program that scales by more than we would is left alone.
        """
        scale = self[Field.SCALE]
        return torch.maximum(scale / seed, torch.minimum(scale, self.one))

    def advance(self, policy: ScalePolicy) -> None:
        """End a step: grow, shrink or keep the scale."""
        found = self[Field.FOUND] > 0
        scale, good, patience = self[Field.SCALE], self[Field.GOOD], self[Field.PATIENCE]
        falls = found & (patience <= 1)
        good = torch.where(found, 0.0, good + 1)
        grows = good >= policy.growth_interval
        patience = torch.where(found, (patience - 1).clamp_(min=1), patience)
        patience = torch.where(grows, float(policy.hysteresis), patience)
        at_floor = torch.zeros_like(found)
        if not policy.is_static:
            scale = torch.where(falls, (scale * 0.5).clamp(min=policy.floor), scale)
            at_floor = falls & (scale <= policy.floor)
            scale = torch.where(grows, (scale * 2.0).clamp(max=policy.ceiling), scale)
        in_a_row = torch.where(found, self[Field.FALLS] + falls, 0.0)
        now = {
            Field.SCALE: scale,
            Field.INVERSE: scale.reciprocal(),
            Field.GOOD: torch.where(grows, 0.0, good),
            Field.PATIENCE: patience,
            Field.FALLS: in_a_row,
            Field.FOUND: torch.zeros_like(scale),
            Field.SKIPPING: torch.zeros_like(scale),
            Field.SKIPPED: found.float(),
            Field.AT_FLOOR: torch.where(found, at_floor, self[Field.AT_FLOOR]),
            Field.OVERFLOWS: self[Field.OVERFLOWS] + found,
        }
        self.values.copy_(torch.stack([now.get(name, self[name]).float() for name in Field]))
