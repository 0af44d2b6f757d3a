"""What the update of one class of parameters computes, from traces of two representatives.

If the graph falls into two independent and equal parts, one expression serves every tensor of the
class. Branches on state or data are followed both ways and joined by a select; branches on
hyperparameters become guards, which say when to trace again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpcompile.codegen.expr import Expr, Load, Scalar, load, postorder, scalar, select, substitute
from mpcompile.codegen.extract import Extractor
from mpcompile.codegen.values import Call, Extracted, Value
from mpcompile.errors import CodegenError
from mpcompile.runtime.tracing import StepTrace

MAX_PATHS = 8
Tracer = Callable[[tuple[bool, ...]], StepTrace]


@dataclass(frozen=True)
class Guard:
    """``condition`` had ``value`` while tracing; it reads hyperparameters only."""

    condition: Expr
    value: float


@dataclass(frozen=True)
class Analysis:
    """The update of a class. ``results`` maps leaf names (param, state.x) to new values."""

    results: Mapping[str, Expr]
    guards: tuple[Guard, ...]
    calls: tuple[Call, ...]
    reads_shape: bool


@dataclass(frozen=True)
class _Choice:
    """A branch on state or data, with the outcome that this path took."""

    position: int
    condition: Expr
    value: bool


@dataclass(frozen=True)
class _Path:
    results: Mapping[str, Expr]
    choices: tuple[_Choice, ...]
    guards: tuple[Guard, ...]
    calls: tuple[Call, ...]
    outcomes: tuple[bool, ...]
    reads_shape: bool


def local_name(name: str) -> str:
    """Return a leaf name without its owner."""
    return name.rpartition(":")[2]


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
    """Return the owners of the leaves of ``expr``; shared leaves have none."""
    names = [
        leaf.buffer if isinstance(leaf, Load) else leaf.name
        for leaf in postorder([expr])
        if isinstance(leaf, (Load, Scalar))
    ]
    return {name.partition(":")[0] for name in names if ":" in name}


def analyze(trace: Tracer) -> Analysis:
    """Trace every path through the step and join them.

    Raises:
        CodegenError: the representatives differ or are coupled, a state-dependent number was baked
            in, or there are too many paths.
    """
    guards: dict[tuple[Expr, float], Guard] = {}
    calls: list[Call] = []
    shapes: list[bool] = []
    budget = [MAX_PATHS]

    def explore(forced: tuple[bool, ...], depth: int) -> Mapping[str, Expr]:
        budget[0] -= 1
        if budget[0] < 0:
            raise CodegenError(
                f"fuse-updates: the step has more than {MAX_PATHS} paths through branches on state."
            )
        path = _trace_path(trace, forced)
        shapes.append(path.reads_shape)
        guards.update({(guard.condition, guard.value): guard for guard in path.guards})
        calls.extend(call for call in path.calls if call not in calls)
        return join(path, depth)

    def join(path: _Path, depth: int) -> Mapping[str, Expr]:
        if depth == len(path.choices):
            return path.results
        choice = path.choices[depth]
        other = explore((*path.outcomes[: choice.position], not choice.value), depth + 1)
        same = join(path, depth + 1)
        yes, no = (same, other) if choice.value else (other, same)
        return {name: select(choice.condition, yes[name], no[name]) for name in yes}

    results = explore((), 0)
    if calls and len(shapes) > 1:
        raise CodegenError(
            "fuse-updates: the step branches on state around whole-tensor operations."
        )
    return Analysis(results, tuple(guards.values()), tuple(calls), any(shapes))


def _trace_path(trace: Tracer, forced: tuple[bool, ...]) -> _Path:
    """Trace until every representative takes the same path; each try settles one branch."""
    for _ in range(4 * MAX_PATHS):
        step = trace(forced)
        found = Extractor(step.leaves, step.shapes).run(step.gm)
        conditions = found.outputs[len(step.outputs) :]
        outcomes: list[bool] = []
        choices: dict[Expr, _Choice] = {}
        guards: list[Guard] = []
        conflict = False
        for made, value in zip(step.decisions.made, conditions, strict=True):
            condition = _single_owner(value)
            if not isinstance(made.value, bool) or not owners(value.expr):
                guards.append(_guard(value, made.value))
            elif condition not in choices:
                choices[condition] = _Choice(len(outcomes), condition, made.value)
            elif choices[condition].value != made.value:
                forced, conflict = (*outcomes, not made.value), True
                break
            if isinstance(made.value, bool):
                outcomes.append(made.value)
        if not conflict:
            results = _same_results(step, found)
            calls = _same_calls(found, len(step.shapes))
            ordered = tuple(choices.values())
            return _Path(results, ordered, tuple(guards), calls, tuple(outcomes), step.reads_shape)
    raise CodegenError("fuse-updates: the representatives do not take the same path.")


def _single_owner(value: Value) -> Expr:
    if len(owners(value.expr)) > 1:
        raise CodegenError("fuse-updates: a branch reads two parameters; the update couples them.")
    return localize(value.expr)


def _guard(value: Value, outcome: float) -> Guard:
    if owners(value.expr):
        raise CodegenError(
            f"fuse-updates: Python computes with {localize(value.expr)} where it cannot be traced, "
            f"so its value of the moment ({outcome}) would be baked in."
        )
    return Guard(value.expr, outcome)


def _same_results(step: StepTrace, found: Extracted) -> Mapping[str, Expr]:
    """Return what one representative's leaves become, if all become the same."""
    per_owner: list[dict[str, Expr]] = [{} for _ in step.shapes]
    for leaf, value in zip(step.outputs, found.outputs, strict=False):
        if owners(value.expr) - {str(leaf.owner)}:
            raise CodegenError(
                f"fuse-updates: {local_name(leaf.name)} of one parameter depends on another one."
            )
        per_owner[leaf.owner][local_name(leaf.name)] = localize(value.expr)
    first = per_owner[0]
    if any(other != first for other in per_owner[1:]):
        raise Different("fuse-updates: the updates of two parameters of one class differ.")
    return first


class Different(CodegenError):
    """Two representatives do not share one expression; classes have to be finer."""


def _same_calls(found: Extracted, num_owners: int) -> tuple[Call, ...]:
    """Return the calls of one representative, if all make the same."""
    per_owner = [tuple(map(_local_call, found.calls.get(o, ()))) for o in range(num_owners)]
    if any(calls != per_owner[0] for calls in per_owner[1:]):
        raise Different("fuse-updates: two parameters of one class need different ATen calls.")
    return per_owner[0]


def _local_call(call: Call) -> Call:
    def local(arg: object) -> object:
        return Value(localize(arg.expr), arg.shape, 0) if isinstance(arg, Value) else arg

    args = tuple(_map(local, arg) for arg in call.args)
    kwargs = tuple((name, _map(local, arg)) for name, arg in call.kwargs)
    return Call(
        call.target, args, kwargs, local_name(call.result), call.index, call.shape, call.dtype
    )


def _map(function: Callable[[object], object], arg: object) -> object:
    if isinstance(arg, (list, tuple)):
        return tuple(_map(function, item) for item in arg)
    return function(arg)


_OPS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
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


def guards_hold(guards: Sequence[Guard], values: Mapping[str, float]) -> bool:
    """Whether the hyperparameters ``values`` still take the traced branches."""
    return all(evaluate(guard.condition, values) == guard.value for guard in guards)
