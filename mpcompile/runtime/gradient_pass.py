"""What one pass over all gradients finds out: their norm, and whether every element is finite.

A sum in f64 of squares of f32 or of 16 bits cannot overflow, so it is finite exactly if all that
was added is: then the norm tells both. Where it does not, because a clamp comes before it or the
sum may overflow by itself, the largest magnitude is a second sum of the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpcompile.codegen.expr import Expr, Reduce, apply, cast, load, reduce, scalar
from mpcompile.codegen.schedule import Case
from mpcompile.runtime.cases import CLAMP, before_clamp, prepared_grad

NORM_SUM = 0
"""Which sum of a row the norm comes from."""


@dataclass(frozen=True)
class GradientPass:
    """What is wanted of one pass.

    Attributes:
        steps: what happens to the gradients first, one number of the launch each.
        order: of the norm of what that gives; None if no norm is wanted.
        checks: whether it is to be found out which gradients are not finite. That is looked at
            before the first clamp, which would hide it, and after unscaling, which may overflow.
    """

    steps: tuple[str, ...]
    order: float | None
    checks: bool

    @property
    def name(self) -> str:
        """What the pass is called in reports."""
        if self.order is None:
            return "gradient overflow"
        order = "" if self.order == 2 else f" of order {self.order:g}"
        return f"gradient norm{order}{' and overflow' if self.checks else ''}"

    @property
    def fold(self) -> str:
        """How what the tensors give for the norm is put together."""
        return "max" if self.order == math.inf else "sum"

    def check_sum(self, dtypes: Sequence[str]) -> int:
        """Return which sum of a row is not finite if an element is not; any, without a check."""
        is_first = not self.checks or self.order is None or self._norm_tells(dtypes)
        return NORM_SUM if is_first else NORM_SUM + 1

    def cases(self, dtypes: Sequence[str]) -> list[Case]:
        """Return the case of gradients of each dtype; their sums are in one order."""
        tells = self.order is not None and self._norm_tells(dtypes)
        cases = []
        for dtype in dtypes:
            sums: list[Expr] = [] if self.order is None else [self._norm(dtype, self.order)]
            if self.checks and not tells:
                magnitude = _magnitude(_element(dtype, before_clamp(self.steps)))
                sums.append(reduce("max", magnitude, "f64"))
            cases.append(Case(sums=tuple(value for value in sums if isinstance(value, Reduce))))
        return cases

    def _norm_tells(self, dtypes: Sequence[str]) -> bool:
        """Whether the sum for the norm is finite exactly if all elements are."""
        cannot_overflow = self.order == math.inf or (self.order in (1, 2) and "f64" not in dtypes)
        return cannot_overflow and CLAMP not in self.steps

    def _norm(self, dtype: str, order: float) -> Expr:
        """Return the sum of squares, of magnitudes or of powers, or the largest magnitude."""
        element = _element(dtype, self.steps)
        if order == 2:
            return reduce("sum", apply("mul", element, element, dtype="f64"), "f64")
        magnitude = _magnitude(element)
        if order == 1:
            return reduce("sum", magnitude, "f64")
        if order == math.inf:
            return reduce("max", magnitude, "f64")
        power = apply("pow", magnitude, scalar("input.order", "f64"), dtype="f64")
        return reduce("sum", power, "f64")


def _element(dtype: str, steps: Sequence[str]) -> Expr:
    return cast(prepared_grad(load("grad", dtype), steps), "f64")


def _magnitude(element: Expr) -> Expr:
    return apply("abs", element, dtype="f64")
