"""A scalar expression IR: what a kernel computes for one element of one tensor.

Leaves are ``Load`` (one element of a buffer), ``Scalar`` (one value for a whole tensor) and
``Constant``. ``Reduce`` folds an expression over all elements of a tensor, so its value is uniform
again: two phases, and no barrier between blocks. Casts are ordinary ``Apply`` nodes; nothing
converts implicitly. Expressions are interned, so equal ones are the same object: identity is
equality, sharing is free, and tables of expressions are keyed by them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

FLOATS = ("f16", "bf16", "f32", "f64")
DTYPES = (*FLOATS, "i64", "bool")
BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i64": 8, "bool": 1}
"""Bytes of one element as a tensor stores it, by dtype name."""


@dataclass(frozen=True, eq=False)
class Expr:
    """One value with a dtype out of ``DTYPES``; compare with ``is``."""

    dtype: str

    @property
    def args(self) -> tuple[Expr, ...]:
        """The operands, in order."""
        return ()

    def __str__(self) -> str:
        return format_expr(self)


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """Element ``i`` of ``buffer``, in the dtype the buffer stores."""

    buffer: str


@dataclass(frozen=True, eq=False)
class Scalar(Expr):
    """A value that is the same for all elements of a tensor."""

    name: str


@dataclass(frozen=True, eq=False)
class Constant(Expr):
    """A literal. ``value`` is a float, an int or a bool, as ``dtype`` says."""

    value: float


@dataclass(frozen=True, eq=False)
class Apply(Expr):
    """``op`` of ``operands``; ``dtype`` is the dtype of the result."""

    op: str
    operands: tuple[Expr, ...]

    @property
    def args(self) -> tuple[Expr, ...]:
        """The operands, in order."""
        return self.operands


@dataclass(frozen=True, eq=False)
class Reduce(Expr):
    """``op`` (sum, max) of ``operand`` over all elements of one tensor; zero for an empty one."""

    op: str
    operand: Expr

    @property
    def args(self) -> tuple[Expr, ...]:
        """The one operand."""
        return (self.operand,)


@dataclass(frozen=True)
class Store:
    """Write ``value`` to ``buffer``: to element ``i``, or to its only element if uniform."""

    buffer: str
    value: Expr


_interned: dict[tuple[object, ...], Expr] = {}
_lock = threading.Lock()


def _intern(key: tuple[object, ...], build: Callable[[], Expr]) -> Expr:
    with _lock:
        if key not in _interned:
            _interned[key] = build()
        return _interned[key]


def load(buffer: str, dtype: str) -> Expr:
    """Return the ``Load`` of ``buffer``."""
    return _intern(("load", buffer, dtype), lambda: Load(dtype, buffer))


def scalar(name: str, dtype: str) -> Expr:
    """Return the ``Scalar`` called ``name``."""
    return _intern(("scalar", name, dtype), lambda: Scalar(dtype, name))


def constant(value: float, dtype: str) -> Expr:
    """Return a literal; -0.0 and 0.0 differ, every NaN is one."""
    text = float(value).hex() if dtype in FLOATS else str(int(value))
    return _intern(("constant", text, dtype), lambda: Constant(dtype, value))


def apply(op: str, *args: Expr, dtype: str) -> Expr:
    """Return ``op`` of ``args``; a cast to the dtype that the value has is the value."""
    if op == "cast" and args[0].dtype == dtype:
        return args[0]
    return _intern(("apply", op, args, dtype), lambda: Apply(dtype, op, args))


def reduce(op: str, arg: Expr, dtype: str) -> Expr:
    """Return ``op`` of ``arg`` over all elements."""
    return _intern(("reduce", op, arg, dtype), lambda: Reduce(dtype, op, arg))


def cast(arg: Expr, dtype: str) -> Expr:
    """Return ``arg`` converted to ``dtype``, rounded to nearest even."""
    return apply("cast", arg, dtype=dtype)


def select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return ``yes`` where ``condition`` holds, else ``no``; both have one dtype."""
    assert yes.dtype == no.dtype, (yes.dtype, no.dtype)
    return yes if yes is no else apply("where", condition, yes, no, dtype=yes.dtype)


def postorder(roots: Iterable[Expr]) -> Iterator[Expr]:
    """Yield each expression under ``roots`` once, operands first."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        expr, ready = stack.pop()
        if expr in seen:
            continue
        if ready:
            seen.add(expr)
            yield expr
        else:
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(expr.args))


def substitute(roots: Iterable[Expr], leaves: Mapping[Expr, Expr]) -> list[Expr]:
    """Rebuild ``roots`` with some expressions replaced; the replacements are not entered."""
    roots, done = list(roots), dict(leaves)
    for expr in postorder(roots):
        if expr not in done:
            done[expr] = rebuild(expr, tuple(done[arg] for arg in expr.args))
    return [done[root] for root in roots]


def rebuild(expr: Expr, args: tuple[Expr, ...]) -> Expr:
    """Return ``expr`` with other operands."""
    if args == expr.args:
        return expr
    if isinstance(expr, Reduce):
        return reduce(expr.op, args[0], expr.dtype)
    assert isinstance(expr, Apply)
    return apply(expr.op, *args, dtype=expr.dtype)


def uniform_set(roots: Iterable[Expr]) -> set[Expr]:
    """Return the expressions under ``roots`` that have one value for a whole tensor."""
    uniform: set[Expr] = set()
    for expr in postorder(roots):
        if isinstance(expr, Reduce) or (
            not isinstance(expr, Load) and all(arg in uniform for arg in expr.args)
        ):
            uniform.add(expr)
    return uniform


def levels(roots: Iterable[Expr], available: Mapping[str, int] | None = None) -> dict[Expr, int]:
    """Return the phase in which each expression under ``roots`` can be computed.

    A ``Reduce`` over values of phase k is known in phase k + 1. ``available`` gives the first phase
    in which a leaf, by its buffer or scalar name, can be read; the others are there from phase 0.
    """
    level: dict[Expr, int] = {}
    for expr in postorder(roots):
        below = max((level[arg] for arg in expr.args), default=0)
        if isinstance(expr, (Load, Scalar)) and available:
            below = available.get(expr.buffer if isinstance(expr, Load) else expr.name, 0)
        level[expr] = below + isinstance(expr, Reduce)
    return level


def format_expr(expr: Expr) -> str:
    """Return ``expr`` as one line of text, for tests and reports."""
    if isinstance(expr, Load):
        return f"{expr.buffer}[i]"
    if isinstance(expr, Scalar):
        return expr.name
    if isinstance(expr, Constant):
        return repr(expr.value)
    inner = ", ".join(format_expr(arg) for arg in expr.args)
    if isinstance(expr, Reduce):
        return f"{expr.op}_i({inner})"
    assert isinstance(expr, Apply)
    return f"{expr.dtype}({inner})" if expr.op == "cast" else f"{expr.op}({inner})"
