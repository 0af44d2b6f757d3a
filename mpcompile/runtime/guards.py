"""What Python computes from hyperparameters: conditions of a trace, and new numbers of groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpcompile.codegen.expr import Apply, Expr, Reduce, Scalar, postorder
from mpcompile.errors import CodegenError
from mpcompile.runtime.coupling import brief, leaf_name, local_name


@dataclass(frozen=True)
class Guard:
    """``condition`` had ``value`` while tracing; it reads hyperparameters of ``group`` only."""

    condition: Expr
    value: float
    group: int = 0


_OPS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "fma": lambda a, b, c: a * b + c,
    "neg": operator.neg,
    "abs": abs,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": operator.not_,
    "trunc": math.trunc,
    "where": lambda condition, yes, no: yes if condition else no,
    "cast": lambda value: value,
}


def evaluate(expr: Expr, values: Mapping[str, float]) -> float:
    """Return ``expr`` of Python numbers, as Python computes it; for guards."""
    done: dict[Expr, float] = {}
    for item in postorder([expr]):
        if isinstance(item, Scalar):
            done[item] = values[item.name]
        elif not item.args:
            done[item] = item.value  # type: ignore[attr-defined]  # a Constant
        else:
            done[item] = _OPS[item.op](*(done[arg] for arg in item.args))  # type: ignore[attr-defined]
    return done[expr]


def check_on_host(results: Sequence[tuple[str, Expr]]) -> None:
    """Raise CodegenError if the new numbers of groups are not for Python to compute."""
    for name, value in results:
        leaves = [leaf_name(leaf) for leaf in postorder([value]) if leaf_name(leaf) is not None]
        known = all(":group." in leaf or leaf.startswith("total.") for leaf in leaves if leaf)
        ops = {item.op for item in postorder([value]) if isinstance(item, (Apply, Reduce))}
        if not known or not ops <= set(_OPS):
            raise CodegenError(
                f"fuse-updates: the step changes {local_name(name).removeprefix('group.')!r} of "
                f"its group to what the host does not compute ({brief(value)})."
            )


def guards_hold(guards: Sequence[Guard], values: Mapping[str, float]) -> bool:
    """Whether the hyperparameters ``values`` still take the traced branches."""
    return all(evaluate(guard.condition, values) == guard.value for guard in guards)
