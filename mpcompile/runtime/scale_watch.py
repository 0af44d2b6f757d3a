"""Tell of a loss scale in trouble, without waiting for the device.

The state is copied to the host behind each step and looked at in later calls, when the copy has
arrived: on a CPU at once, on a GPU one or two steps later.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mpcompile.runtime.machines import Reading, machine_of

if TYPE_CHECKING:
    from mpcompile.runtime.loss_scale import LossScale

FALLS_IN_A_ROW = 5
"""How many steps in a row may overflow before it is worth a word."""


@dataclass
class _Copy:
    """A copy of what is on the host, which has no need to travel."""

    values: Tensor

    def has_arrived(self) -> bool:
        return True


class ScaleWatch:
    """Reads the state of a loss scale late, and warns once for each trouble."""

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale
        self._coming: list[Reading] = []
        self._told: set[str] = set()

    def copy(self) -> None:
        """Start copies of the state, unless older ones are still on their way."""
        if self._coming:
            return
        for values in self._scale.snapshot():
            machine = machine_of(values.device)
            copy = _Copy(values.cpu().clone()) if machine is None else machine.read_later(values)
            self._coming.append(copy)

    def poll(self) -> None:
        """Look at the copies if all have arrived."""
        if not all(reading.has_arrived() for reading in self._coming):
            return
        coming, self._coming = self._coming, []
        for reading in coming:
            self._look(reading.values)

    def _look(self, values: Tensor) -> None:
        now = self._scale.read(values)
        first = f"The first gradient to overflow was that of {now.first}. " if now.first else ""
        advice = (
            f"{first}mpcompile.explain(step, ...) names the op; keep it in float32 with keep_fp32, "
            "or use dtype='bfloat16'."
        )
        self._tell(
            "falls",
            now.falls >= FALLS_IN_A_ROW,
            f"mpcompile: {now.falls} steps in a row overflowed in float16 and were skipped; the "
            f"loss scale is {now.scale:g}. {advice}",
        )
        self._tell(
            "floor",
            now.at_floor,
            f"mpcompile: a step overflowed in float16 although the loss scale is at its floor, "
            f"{now.scale:g}: not the scale is too large but a value in the step. {advice}",
        )
        self._tell(
            "no update",
            bool(now.overflows) and not self._scale.has_updated and not self._scale.was_asked,
            "mpcompile: gradients overflowed in float16, and no optimizer is part of the compiled "
            "step, so none was told to skip. Put opt.step() into the step, or guard it: "
            "`if not mpcompile.skipped(step): opt.step()`.",
        )

    def _tell(self, trouble: str, holds: bool, text: str) -> None:
        if not holds:
            self._told.discard(trouble)
        elif trouble not in self._told:
            self._told.add(trouble)
            warnings.warn(text, stacklevel=2)
