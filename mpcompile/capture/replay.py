"""Replay a step that was captured whole eagerly, in float32, and compare what it did to parameters.

A guard against what no one has thought of: a parameter that does not move, a gradient that is
counted twice. So bounds are wide: rounding to 16 bits passes, a lost factor does not. All that a
whole step does in Python Dynamo has seen, so running it again from a snapshot has no other effects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpcompile.capture.dynamo_api import Call
from mpcompile.capture.reach import reach
from mpcompile.capture.snapshot import remember
from mpcompile.errors import CaptureError
from mpcompile.runtime import dispatch

_NOISE = 1e-3
"""A parameter whose eager update is this much smaller than the largest may be all rounding."""
_NOISE_GRADIENT = 1e-5
"""A gradient that is this much smaller than the largest may be all rounding."""
_NOISE_HALF = 0.1
"""How large such an update may be in 16 bits, relative to the largest."""


@dataclass(frozen=True)
class Bounds:
    """How far an update may be from eager's: ratio of sizes, cosine of all updates together."""

    ratio: float
    cosine: float


EXACT = Bounds(ratio=2.0, cosine=0.7)
HALF = Bounds(ratio=4.0, cosine=0.3)
MOVES = Bounds(ratio=math.inf, cosine=-2.0)
"""Where the step draws other random numbers than eager: only whether a parameter moves."""


class Replay:
    """What a step started from, to run it again."""

    def __init__(self, call: Call) -> None:
        self._call = call
        roots = (call.function, call.args, call.kwargs)
        found = list(reach(*roots))
        self._put_back = remember(*roots)
        self._optimizers = [item for item in found if isinstance(item, Optimizer)]
        names = _names(item for item in found if isinstance(item, nn.Module))
        self._params = {
            names.get(id(param), f"parameter {position} of {type(optimizer).__name__}"): param
            for optimizer in self._optimizers
            for position, param in enumerate(_params(optimizer))
        }
        self._before = self._values()

    def _values(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self._params.items()}

    @contextmanager
    def _watching_gradients(self) -> Iterator[dict[str, float]]:
        """Note the size of each gradient (rms) when an optimizer's step begins."""
        sizes: dict[str, float] = {}

        def note(*_: Any) -> None:
            for name, param in self._params.items():
                if param.grad is not None and not param.grad.is_sparse:
                    sizes[name] = _rms(param.grad.double())

        handles = [optimizer.register_step_pre_hook(note) for optimizer in self._optimizers]
        try:
            yield sizes
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, bounds: Bounds) -> None:
        """Run the step eagerly from where it started and leave everything as it is now.

        Raises:
            CaptureError: a parameter is not where eager takes it. Everything is put back to where
                the step started.
        """
        ours = self._values()
        call = self._call
        put_back_ours = remember(call.function, call.args, call.kwargs)
        self._put_back()
        with dispatch.suspended(), self._watching_gradients() as gradients:
            torch.compiler.disable(call.function)(*call.args, **call.kwargs)
        compared = _without_noise(self._before, gradients)
        found = _difference(compared, self._values(), ours, bounds)
        if found:
            self._put_back()
            raise CaptureError(
                f"check: the step was captured as one graph, but {found}. Parameters, optimizer "
                "state and random state are as before the step. Compile with "
                "options={'capture': 'regions'}, or with options={'check': 'off'} if the step is "
                "not meant to give the same twice, and please report it."
            )
        put_back_ours()


def _without_noise(before: dict[str, Tensor], gradients: dict[str, float]) -> dict[str, Tensor]:
    """Leave out parameters whose gradient is nothing but rounding.

    That of a key's bias in attention is zero, say; Adam makes steps of full size of what is left.
    """
    largest = max(gradients.values(), default=0.0)
    return {
        name: value
        for name, value in before.items()
        if gradients.get(name, largest) > _NOISE_GRADIENT * largest
    }


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(modules: Iterator[nn.Module]) -> dict[int, str]:
    """Return the longest name that each parameter has in any module."""
    names: dict[int, str] = {}
    for module in modules:
        for name, param in module.named_parameters():
            if len(name) > len(names.get(id(param), "")):
                names[id(param)] = name
    return names


def _difference(
    before: dict[str, Tensor], eager: dict[str, Tensor], ours: dict[str, Tensor], bounds: Bounds
) -> str:
    """Return what differs, or nothing."""
    wanted = {name: (eager[name] - before[name]).double() for name in before}
    found = {name: (ours[name] - before[name]).double() for name in before}
    sizes = {name: _rms(update) for name, update in wanted.items()}
    largest = max(sizes.values(), default=0.0)
    for name, want in sizes.items():
        have = _rms(found[name])
        if want <= _NOISE * largest and have <= _NOISE_HALF * largest:
            continue
        if not want / bounds.ratio <= have <= want * bounds.ratio or (have == 0) != (want == 0):
            return f"{name!r} moved by {have:.3g} (rms) where eager moves it {want:.3g}"
    cosine = _cosine(list(found.values()), list(wanted.values()))
    if largest > 0 and cosine < bounds.cosine:
        return f"all parameters together moved in another direction than eager ({cosine:.2f})"
    return ""


def _rms(update: Tensor) -> float:
    return float(update.square().mean().sqrt()) if update.numel() else 0.0


def _cosine(some: list[Tensor], others: list[Tensor]) -> float:
    dot = sum(float((a * b).sum()) for a, b in zip(some, others, strict=True))
    sizes = [math.sqrt(sum(float(t.square().sum()) for t in group)) for group in (some, others)]
    return dot / (sizes[0] * sizes[1]) if all(sizes) else 0.0
