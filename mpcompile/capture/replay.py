"""Replay a step that was captured whole eagerly, in float32, and compare what it did to parameters.

A guard against what no one has thought of: a parameter that does not move, a gradient that is
counted twice. So bounds are wide: rounding to 16 bits passes, a lost factor does not. Where it does
not pass, because a loss makes much of little (the logarithm of a spectrum, say), the step runs once
more under ``torch.autocast``: what is out of bounds there too is rounding. All that a whole step
does in Python Dynamo has seen, so running it again from a snapshot has no other effects.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
_LUCK = 0.3
"""How much further off than another rounding one rounding to 16 bits may be, as a cosine."""
_TOGETHER = "all parameters together"


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

    def compare(self, bounds: Bounds, agree: Callable[[bool], bool]) -> None:
        """Run the step eagerly from where it started and leave everything as it is now.

        Args:
            bounds: how far the step may be from eager.
            agree: whether what it is asked is so on all ranks; each of them asks.

        Raises:
            CaptureError: a parameter is not where eager takes it. Everything is put back to where
                the step started.
        """
        ours, call = self._values(), self._call
        put_back_ours = remember(call.function, call.args, call.kwargs)
        eager, gradients = self._run_again(nullcontext())
        before = _without_noise(self._before, gradients)
        found = wrong = _differences(before, eager, ours, bounds)
        if bounds is HALF and agree(bool(found)):
            wrong = self._beyond_rounding(before, eager, ours, found)
        if wrong:
            self._put_back()
            raise CaptureError(
                f"check: the step was captured as one graph, but {next(iter(wrong.values()))}. "
                "Parameters, optimizer state and random state are as before the step. Compile with "
                "options={'capture': 'regions'}, or with options={'check': 'off'} if the step is "
                "not meant to give the same twice, and please report it."
            )
        put_back_ours()
        if found:
            warnings.warn(
                "mpcompile: check: the first step is very sensitive to rounding to 16 bits: "
                f"{next(iter(found.values()))}, and under torch.autocast it does not agree either. "
                "It trains on. For gradients closer to float32, keep what is sensitive in float32 "
                "with options={'keep_fp32': [...]}.",
                stacklevel=2,
            )

    def _beyond_rounding(
        self,
        before: dict[str, Tensor],
        eager: dict[str, Tensor],
        ours: dict[str, Tensor],
        found: dict[str, str],
    ) -> dict[str, str]:
        """Return what of ``found`` is no rounding: ``torch.autocast`` does much better.

        To bfloat16, which needs no loss scale and rounds no less than float16.
        """
        device = next(iter(before.values())).device.type
        try:
            rounded, _ = self._run_again(torch.autocast(device, torch.bfloat16))
        except Exception:  # noqa: BLE001  # code need not run under autocast; then it tells nothing
            return found
        excused = _differences(before, eager, rounded, HALF)
        at_least = _cosine_of_updates(before, eager, rounded) - _LUCK
        wider = replace(HALF, cosine=min(HALF.cosine, at_least))
        remaining = _differences(before, eager, ours, wider)
        return {n: text for n, text in remaining.items() if n == _TOGETHER or n not in excused}

    def _run_again(
        self, context: AbstractContextManager[Any]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Run the step eagerly from where it started; return parameters and sizes of gradients."""
        call = self._call
        self._put_back()
        with dispatch.suspended(), self._watching_gradients() as gradients, context:
            torch.compiler.disable(call.function)(*call.args, **call.kwargs)
        return self._values(), gradients


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


def _differences(
    before: dict[str, Tensor], eager: dict[str, Tensor], ours: dict[str, Tensor], bounds: Bounds
) -> dict[str, str]:
    """Return what differs: of each parameter that does its name and how, and of all together."""
    wanted = {name: (eager[name] - before[name]).double() for name in before}
    found = {name: (ours[name] - before[name]).double() for name in before}
    sizes = {name: _rms(update) for name, update in wanted.items()}
    largest = max(sizes.values(), default=0.0)
    differing = {}
    for name, want in sizes.items():
        have = _rms(found[name])
        if want <= _NOISE * largest and have <= _NOISE_HALF * largest:
            continue
        if not want / bounds.ratio <= have <= want * bounds.ratio or (have == 0) != (want == 0):
            differing[name] = f"{name!r} moved by {have:.3g} (rms) where eager moves it {want:.3g}"
    cosine = _cosine_of_updates(before, eager, ours)
    if largest > 0 and cosine < bounds.cosine:
        differing[_TOGETHER] = f"{_TOGETHER} moved in another direction than eager ({cosine:.2f})"
    return differing


def _rms(update: Tensor) -> float:
    return float(update.square().mean().sqrt()) if update.numel() else 0.0


def _cosine_of_updates(
    before: dict[str, Tensor], eager: dict[str, Tensor], ours: dict[str, Tensor]
) -> float:
    """Return the cosine between two updates, each of all parameters together."""
    dot = squares = squares_of_eager = 0.0
    for name, start in before.items():
        found, wanted = (ours[name] - start).double(), (eager[name] - start).double()
        dot += float((found * wanted).sum())
        squares += float(found.square().sum())
        squares_of_eager += float(wanted.square().sum())
    return dot / math.sqrt(squares * squares_of_eager) if squares and squares_of_eager else 0.0
