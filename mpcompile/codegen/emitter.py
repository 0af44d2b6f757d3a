"""The walk that both C-family targets share: expressions to statements.

One postorder walk names every value that is not a leaf once, so all targets print the same
statements in the same order. A target gives spellings only; there are no formulas and no dtype
decisions here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mpcompile.codegen.expr import Apply, Constant, Expr, postorder

LeafSpelling = Callable[[Expr], str | None]
"""The text for a value that need not be computed here, or None."""


_ARRAYS = {
    "ptr": "void* const* ptr = t.pointers + row * COLUMNS;",
    "number": "const double* number = t.numbers + row * NUMBERS;",
    "number_out": "double* number_out = t.numbers_out + row * NUMBERS;",
    "shared": "const double* shared = t.shared + t.groups[row] * SHARED;",
    "input": "const double* input = t.inputs;",
    "sum": "double* sum = t.sums + row * SUMS;",
    "term": "double* term = t.terms + row * TOTALS;",
    "total": "const double* total = t.totals;",
}
"""What a kernel reads of its table, by the name of the array."""


def with_sources(lines: list[str]) -> list[str]:
    """Prepend the declarations of the arrays that ``lines`` read."""
    text = "\n".join(lines)
    return [line for name, line in _ARRAYS.items() if f"{name}[" in text] + lines


class Target(Protocol):
    """The spellings of one language."""

    def ctype(self, dtype: str) -> str:
        """Return the type of a value of ``dtype``."""

    def literal(self, value: float, dtype: str) -> str:
        """Return a literal of ``dtype``."""

    def spelling(self, op: str, dtype: str, args: list[str]) -> str:
        """Return ``op`` applied to ``args``; ``dtype`` is the dtype of the first operand."""

    def cast(self, source: str, dest: str, arg: str) -> str:
        """Return ``arg`` converted from dtype ``source`` to ``dest``."""


class Block:
    """Statements of one scope; ``names`` says what each expression is called in it."""

    def __init__(self, target: Target, leaf: LeafSpelling, prefix: str = "x") -> None:
        self.target, self.leaf, self.prefix = target, leaf, prefix
        self.names: dict[Expr, str] = {}
        self.lines: list[str] = []

    def emit(self, roots: Iterable[Expr]) -> list[str]:
        """Append the statements that ``roots`` need; return how each root is spelled."""
        roots = list(roots)
        for expr in self._needed(roots):
            self.names[expr] = self._value(expr)
        return [self.names[root] for root in roots]

    def _needed(self, roots: list[Expr]) -> list[Expr]:
        """Return the expressions under ``roots`` that are not named yet, in postorder.

        What a leaf spelling covers is taken as it is, so nothing below it is entered.
        """
        covered = {e: text for e in postorder(roots) if (text := self.leaf(e)) is not None}
        wanted: set[Expr] = set()
        stack = list(roots)
        while stack:
            expr = stack.pop()
            if expr not in wanted and expr not in self.names:
                wanted.add(expr)
                stack.extend(() if expr in covered else expr.args)
        return [expr for expr in postorder(roots) if expr in wanted]

    def _value(self, expr: Expr) -> str:
        text = self.leaf(expr)
        if text is None and isinstance(expr, Constant):
            return self.target.literal(expr.value, expr.dtype)
        if text is None:
            assert isinstance(expr, Apply), f"no spelling for the leaf {expr}"
            args = [self.names[arg] for arg in expr.args]
            if expr.op == "cast":
                text = self.target.cast(expr.args[0].dtype, expr.dtype, args[0])
            else:
                text = self.target.spelling(expr.op, expr.args[0].dtype, args)
        name = f"{self.prefix}{len(self.names)}"
        self.lines.append(f"const {self.target.ctype(expr.dtype)} {name} = {text};")
        return name


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    """Return ``lines`` two spaces a level further in; empty lines stay empty."""
    return [f"{'  ' * levels}{line}" if line else line for line in lines]
