"""From the analysis of a class of parameters to the case of a kernel.

What surrounds the optimizer's arithmetic is added here: the steps that a gradient goes through
first (unscaling, clipping), writing the gradient back, the 16-bit copy of the parameter, and the
buffers through which whole-tensor calls (a matrix product) exchange values with the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mpcompile.codegen.expr import (
    Expr,
    Load,
    Scalar,
    Store,
    apply,
    cast,
    levels,
    load,
    postorder,
    scalar,
    substitute,
    uniform_set,
)
from mpcompile.codegen.schedule import Case, Fold, Kernel, Term, settled_phase
from mpcompile.codegen.values import NUM_ELEMENTS, Call, Value, compute_dtype
from mpcompile.errors import CodegenError
from mpcompile.runtime.analysis import Analysis
from mpcompile.runtime.coupling import total_name
from mpcompile.runtime.structure import ParamStructure

SCALE, CLAMP, OWN = "scale", "clamp", "own"
OWN_FACTOR = "number.own_factor"
"""The number of a row that its gradient is multiplied by in the step ``OWN``."""


@dataclass(frozen=True)
class Surroundings:
    """What a kernel does around the update; dtypes are names. Part of a case's key.

    ``grad_steps`` is what happens to the gradient first, each step with one number of the launch:
    ``scale`` multiplies by it, ``clamp`` limits to plus or minus it; ``own`` multiplies by a number
    that each gradient has for itself.
    """

    grad: str
    copy: str | None = None
    write_grad: bool = False
    grad_steps: tuple[str, ...] = (SCALE,)


@dataclass(frozen=True)
class PlannedCall:
    """An ATen call between two phases: it runs after ``phase``.

    ``buffers`` maps positions among its flat arguments to buffers that the kernel filled or that
    are the row's own; ``numbers`` to numbers that the kernel wrote.
    """

    call: Call
    phase: int
    buffers: tuple[tuple[int, str], ...]
    numbers: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class PlannedCase:
    """A case, the calls between its phases, and states that are copied from a call's result.

    ``host`` is what the host computes first, where the kernel runs on another device; ``late``
    names the state of the host that this device counts for itself.
    """

    case: Case
    calls: tuple[PlannedCall, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    buffers: tuple[tuple[str, str], ...] = ()
    host: Case = field(default_factory=Case)
    late: tuple[str, ...] = ()


def step_input(position: int) -> str:
    """Return the name of the launch number that grad step ``position`` uses."""
    return f"input.grad_step.{position}"


def before_clamp(steps: Sequence[str]) -> tuple[str, ...]:
    """Return the steps that what is not finite outlives: a clamp would hide it."""
    return tuple(itertools.takewhile(lambda step: step != CLAMP, steps))


def prepared_grad(grad: Expr, steps: Sequence[str]) -> Expr:
    """Return the gradient after ``steps``, in the dtype it is computed in."""
    at = compute_dtype(grad.dtype)
    value = cast(grad, at)
    for position, step in enumerate(steps):
        name = OWN_FACTOR if step == OWN else step_input(position)
        number = cast(scalar(name, "f64"), at)
        if step in (SCALE, OWN):
            value = apply("mul", value, number, dtype=at)
        else:
            low = apply("max", value, apply("neg", number, dtype=at), dtype=at)
            value = apply("min", low, number, dtype=at)
    return value


def plan_case(analysis: Analysis, structure: ParamStructure, around: Surroundings) -> PlannedCase:
    """Return the case that updates parameters of ``structure``."""
    is_scalar = structure.ndim == 0
    leaf = scalar if is_scalar else load
    traced_dtype = analysis.results["param"].dtype
    traced, real = leaf("grad", traced_dtype), leaf("grad", around.grad)
    grad = cast(prepared_grad(real, around.grad_steps), traced_dtype)
    shapes = {f"state.{entry.key}": entry.kind for entry in structure.state}
    names = list(analysis.results)
    leaves = {traced: grad, **_number_leaves(structure)}
    values = dict(zip(names, substitute(analysis.results.values(), leaves), strict=True))
    changed_grad = values["grad"] is not grad
    stores, copies = [], []
    for name, value in values.items():
        if isinstance(value, (Load, Scalar)) and _leaf_name(value) in (name, f"number.{name}"):
            continue
        if name == "grad":
            if changed_grad or around.write_grad:
                stores.append(Store("grad", cast(value, around.grad)))
        elif shapes.get(name) == "other":
            copies.append((name, _result_of(name, value)))
        else:
            stores.append(Store(f"number.{name}" if shapes.get(name) == "number" else name, value))
    if around.copy:
        stores.append(Store("copy", cast(values["param"], around.copy)))
    calls, extra, temps, dtypes = _plan_calls(analysis.calls, leaves)
    early = frozenset(store.buffer for store in extra)
    case = Case((*stores, *extra), (), temps, early, _terms(analysis, leaves))
    return PlannedCase(case, calls, tuple(copies), dtypes)


def _terms(analysis: Analysis, leaves: dict[Expr, Expr]) -> tuple[Term, ...]:
    """Return what a tensor of the class adds to each total; ``build_kernel`` sets the phases."""
    found = [(n, total.term(analysis.number)) for n, total in enumerate(analysis.totals)]
    return tuple(
        Term(number, substitute([value], leaves)[0], 0)
        for number, value in found
        if value is not None
    )


def _number_leaves(structure: ParamStructure) -> dict[Expr, Expr]:
    """Return the Python numbers of a tensor, mapped to leaves that say so in their names."""
    names = {
        f"state.{entry.key}": entry.dtype for entry in structure.state if entry.kind == "number"
    }
    names[NUM_ELEMENTS] = "i64"
    return {scalar(n, str(d)): scalar(f"number.{n}", str(d)) for n, d in names.items()}


def _leaf_name(leaf: Load | Scalar) -> str:
    return leaf.buffer if isinstance(leaf, Load) else leaf.name


def _result_of(name: str, value: Expr) -> str:
    if isinstance(value, Load):
        return value.buffer
    raise CodegenError(f"fuse-updates: {name} has a shape of its own and is computed elementwise.")


def _plan_calls(
    calls: Sequence[Call], leaves: dict[Expr, Expr]
) -> tuple[
    tuple[PlannedCall, ...],
    list[Store],
    tuple[tuple[str, int], ...],
    tuple[tuple[str, str], ...],
]:
    """Return the calls with their phases, the stores they need, and when results can be read."""
    planned: list[PlannedCall] = []
    stores: list[Store] = []
    dtypes: list[tuple[str, str]] = []
    available: dict[str, int] = {}
    for number, call in enumerate(calls):
        flat = flat_arguments(call)
        buffers, numbers, phase = [], [], 0
        for position, arg in enumerate(flat):
            if not isinstance(arg, Value):
                continue
            expr = substitute([arg.expr], leaves)[0]
            phase = max(phase, levels([expr], available)[expr])
            if isinstance(expr, Load) or (isinstance(expr, Scalar) and arg.shape == ()):
                buffers.append((position, _leaf_name(expr)))
                continue
            name = f"arg.{number}.{position}"
            if expr in uniform_set([expr]):
                name, expr = f"number.{name}", cast(expr, "f64")  # what the table holds
                numbers.append((position, name))
            else:
                buffers.append((position, name))
                dtypes.append((name, expr.dtype))
            stores.append(Store(name, expr))
        planned.append(PlannedCall(call, phase, tuple(buffers), tuple(numbers)))
        available[call.result] = phase + 1
    return tuple(planned), stores, tuple(available.items()), tuple(dtypes)


def flat_arguments(call: Call) -> list[object]:
    """Return the arguments of ``call`` in one list, sequences entered."""
    flat: list[object] = []

    def visit(arg: object) -> None:
        if isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)
        else:
            flat.append(arg)

    for arg in (*call.args, *(arg for _, arg in call.kwargs)):
        visit(arg)
    return flat


def build_kernel(name: str, cases: Sequence[Case], ops: Sequence[str] = ()) -> Kernel:
    """Return a kernel of ``cases``; a leaf's prefix says where it lives, and a tensor has none.

    ``ops`` says how each total folds what the terms of all cases give.
    """
    cases, totals = _with_totals(cases, ops)
    places: dict[str, dict[str, None]] = {"": {"param": None, "grad": None}}
    for case in cases:
        names = [store.buffer for store in case.stores]
        for item in postorder(case.roots):
            names += [_leaf_name(item)] if isinstance(item, (Load, Scalar)) else []
        for leaf in names:
            prefix = leaf.partition(".")[0]
            place = prefix if prefix in ("number", "group", "input", "total") else ""
            places.setdefault(place, {})[leaf] = None
    number, group, launch = (tuple(places.get(p, ())) for p in ("number", "group", "input"))
    return Kernel(name, tuple(cases), tuple(places[""]), number, group, launch, totals)


def _with_totals(
    cases: Sequence[Case], ops: Sequence[str]
) -> tuple[Sequence[Case], tuple[Fold, ...]]:
    """Return the cases with the phases of their terms, and the totals.

    A total is made when the last kind of tensor knows its term, in the same phase for all of them.
    """
    available: dict[str, int] = {}
    folds: list[Fold] = []
    for number, op in enumerate(ops):
        terms = [t.value for case in cases for t in case.terms if t.number == number]
        phase = max((settled_phase(term, available) for term in terms), default=0)
        available[total_name(number)] = phase + 1
        folds.append(Fold(op, phase))
    if not folds:
        return cases, ()
    last = max(available.values())
    return [
        replace(
            case,
            temps=tuple(available.items()),
            terms=tuple(replace(term, phase=folds[term.number].phase) for term in case.terms),
            not_before=last,
        )
        for case in cases
    ], tuple(folds)
