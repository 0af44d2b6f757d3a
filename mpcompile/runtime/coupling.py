"""What couples the parameters of an optimizer: sums and maxima over all of them.

A global gradient norm shows up in a trace as an addition of one uniform value of every
representative. Where all representatives of a class contribute the same expression, the addition
stands for one over all tensors of that class, however many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mpcompile.codegen.expr import (
    FLOATS,
    Apply,
    Constant,
    Expr,
    Load,
    Scalar,
    apply,
    cast,
    load,
    postorder,
    rebuild,
    scalar,
    substitute,
    uniform_set,
)
from mpcompile.errors import CodegenError

_FOLDS = {"add": "sum", "fma": "sum", "max": "max"}
_OPS = {"sum": "add", "max": "max"}


class Coupled(CodegenError):
    """The update of one parameter depends on others; the optimizer has to be traced whole."""


@dataclass(frozen=True)
class Total:
    """The ``op`` (sum, max) over all tensors; ``terms`` holds (class, what one contributes)."""

    op: str
    terms: tuple[tuple[int, Expr], ...]

    def term(self, number: int) -> Expr | None:
        """Return what a tensor of class ``number`` contributes."""
        return dict(self.terms).get(number)


def local_name(name: str) -> str:
    """Return a leaf name without its owner."""
    return name.rpartition(":")[2]


def leaf_name(leaf: Expr) -> str | None:
    """Return the name of a leaf, or None for anything else."""
    if isinstance(leaf, Load):
        return leaf.buffer
    return leaf.name if isinstance(leaf, Scalar) else None


def localize(expr: Expr) -> Expr:
    """Return ``expr`` with the owners dropped from its leaf names."""
    leaves: dict[Expr, Expr] = {}
    for leaf in postorder([expr]):
        if isinstance(leaf, Load):
            leaves[leaf] = load(local_name(leaf.buffer), leaf.dtype)
        elif isinstance(leaf, Scalar):
            leaves[leaf] = scalar(local_name(leaf.name), leaf.dtype)
    return substitute([expr], leaves)[0]


def owners(expr: Expr) -> set[str]:
    """Return the owners of the leaves of ``expr``: tensors by number, groups as ``g0``."""
    names = [name for leaf in postorder([expr]) if (name := leaf_name(leaf)) is not None]
    return {name.partition(":")[0] for name in names if ":" in name}


def tensors(expr: Expr) -> set[int]:
    """Return the numbers of the representatives that ``expr`` reads."""
    return {int(owner) for owner in owners(expr) if owner.isdecimal()}


def total_name(number: int) -> str:
    """Return the name of the leaf that holds total ``number``."""
    return f"total.{number}"


class Couplings:
    """Replaces what is added up over all representatives by leaves, and collects these totals.

    ``class_of`` gives the class of each representative; new totals are appended to ``totals``.
    """

    def __init__(self, class_of: Sequence[int], totals: list[Total]) -> None:
        self.class_of, self.totals = class_of, totals
        self._done: dict[Expr, Expr] = {}

    def resolve(self, expr: Expr) -> Expr:
        """Return ``expr`` such that it reads one representative at most.

        Raises:
            Coupled: it couples representatives in another way.
        """
        if expr not in self._done:
            self._done[expr] = self._resolve(expr)
        return self._done[expr]

    def _resolve(self, expr: Expr) -> Expr:
        if len(tensors(expr)) < 2:
            return expr
        total = self._total(expr) if expr in uniform_set([expr]) else None
        if total is not None:
            return total
        found = rebuild(expr, tuple(self.resolve(arg) for arg in expr.args))
        if len(tensors(found)) > 1:
            raise Coupled(
                f"fuse-updates: the step couples parameters by {brief(expr)}, and not by a sum or "
                "maximum over all of them of one expression."
            )
        return found

    def _total(self, expr: Expr) -> Expr | None:
        """Return ``expr`` as a total, or None if it is not one."""
        chain = _without_casts(expr)
        op = _FOLDS.get(chain.op) if isinstance(chain, Apply) else None
        if op is None:
            return None
        by_owner: dict[int, list[Expr]] = {}
        shared: list[Expr] = []
        for term in self._terms(chain, op):
            found = tensors(term)
            if len(found) > 1:
                return None
            (by_owner.setdefault(found.pop(), []) if found else shared).append(term)
        terms = []
        for number in sorted(set(self.class_of)):
            mine = [by_owner.get(o, []) for o, c in enumerate(self.class_of) if c == number]
            if any(mine):
                common = _common(mine, op, shared)
                if common is None:
                    return None
                terms.append((number, common))
        result = cast(scalar(self._name(Total(op, tuple(terms))), "f64"), expr.dtype)
        for other in shared:
            if not (op == "sum" and isinstance(other, Constant) and other.value == 0):
                result = apply(_OPS[op], result, cast(other, expr.dtype), dtype=expr.dtype)
        return result

    def _name(self, total: Total) -> str:
        if total not in self.totals:
            self.totals.append(total)
        return total_name(self.totals.index(total))

    def _terms(self, expr: Expr, op: str) -> list[Expr]:
        """Return what is folded in ``expr``; what one representative contributes is one term."""
        chain = _without_casts(expr)
        if len(tensors(chain)) < 2:
            return [chain]
        if isinstance(chain, Apply) and _FOLDS.get(chain.op) == op:
            *first, last = chain.operands
            head = apply("mul", *first, dtype=chain.dtype) if chain.op == "fma" else first[0]
            return [*self._terms(head, op), *self._terms(last, op)]
        return [self.resolve(chain)]


def _common(mine: Sequence[list[Expr]], op: str, shared: list[Expr]) -> Expr | None:
    """Return the one expression that all of a class contribute, local and in f64.

    What the first of them was added to, the start of the sum, goes to ``shared``.
    """
    fold = functools.partial(apply, _OPS[op], dtype="f64")
    terms = [
        functools.reduce(fold, [cast(localize(t), "f64") for t in each]) for each in mine if each
    ]
    if len(terms) != len(mine):
        return None
    if len(set(terms)) > 1:
        split = [_without_start(each[0], op) for each in mine if len(each) == 1]
        terms = [cast(localize(rest), "f64") for rest, _ in split]
        shared += [start for _, start in split if start is not None]
    return terms[0] if len(set(terms)) == 1 and len(terms) == len(mine) else None


def _without_start(term: Expr, op: str) -> tuple[Expr, Expr | None]:
    """Split ``term`` into what reads a tensor and what that was added to."""
    if isinstance(term, Apply) and _FOLDS.get(term.op) == op:
        *first, last = term.operands
        head = apply("mul", *first, dtype=term.dtype) if term.op == "fma" else first[0]
        for rest, start in ((head, last), (last, head)):
            if not tensors(start):
                return _without_casts(rest), start
    return term, None


def _without_casts(expr: Expr) -> Expr:
    """Look through casts between floats; totals are kept in f64."""
    while isinstance(expr, Apply) and expr.op == "cast" and _is_float(expr, expr.args[0]):
        expr = expr.args[0]
    return expr


def _is_float(*values: Expr) -> bool:
    return all(value.dtype in FLOATS for value in values)


def brief(expr: Expr) -> str:
    """Return the start of ``expr`` for a message."""
    text = str(localize(expr))
    return text if len(text) <= 80 else f"{text[:77]}..."
