"""Split what a kernel computes into phases.

A phase is partial sums or stores for each chunk of elements, then, for each tensor, the combination
of its partial sums and the stores of uniform values. Reductions travel from phase to phase as one
f64 of a tensor each, totals over all tensors as one f64 of the launch. There is no barrier between
chunks, so a GPU runs one launch a phase and a CPU one parallel loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mpcompile.codegen.expr import (
    BYTES,
    Apply,
    Constant,
    Expr,
    Load,
    Reduce,
    Scalar,
    Store,
    apply,
    constant,
    levels,
    postorder,
    substitute,
    uniform_set,
)


@dataclass(frozen=True)
class Term:
    """What a tensor adds to total ``number`` at the end of ``phase``."""

    number: int
    value: Expr
    phase: int


@dataclass(frozen=True)
class Case:
    """The update of one kind of tensor.

    ``stores`` write its buffers. ``sums`` are reductions wanted for themselves; the caller finds
    number ``k`` among the sums of the row. ``temps`` maps a buffer to the phase after which outside
    code fills it, or in which a total is made; stores to a buffer in ``early`` happen as soon as
    their value is known, the others last, and not before phase ``not_before``. ``terms`` go into
    totals.
    """

    stores: tuple[Store, ...] = ()
    sums: tuple[Reduce, ...] = ()
    temps: tuple[tuple[str, int], ...] = ()
    early: frozenset[str] = frozenset()
    terms: tuple[Term, ...] = ()
    not_before: int = 0

    @property
    def roots(self) -> list[Expr]:
        """Every value that is wanted."""
        stores = [store.value for store in self.stores]
        return [*stores, *self.sums, *(term.value for term in self.terms)]


@dataclass(frozen=True)
class Fold:
    """A total of a kernel: ``op`` (sum, max) over all tensors, made at the end of ``phase``."""

    op: str
    phase: int


@dataclass(frozen=True)
class Kernel:
    """Several cases in one source, and where their leaves live.

    ``columns`` are tensors of a row (buffers, and 0-dim tensors), ``numbers`` Python numbers of a
    row, ``shared`` numbers of a parameter group, ``inputs`` numbers of one launch, ``totals`` what
    tensors add up to.
    """

    name: str
    cases: tuple[Case, ...]
    columns: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    totals: tuple[Fold, ...] = ()

    @property
    def total_phases(self) -> int:
        """How many phases all tensors have to go through before any is written."""
        return max((fold.phase + 1 for fold in self.totals), default=0)


@dataclass
class Phase:
    """What one phase of one case does: loops over elements, then what is done once a tensor.

    ``uniforms`` are the uniform values that the loops read; each chunk computes them for itself.
    """

    uniforms: list[Expr] = field(default_factory=list)
    reductions: list[Reduce] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    uniform_stores: list[Store] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """The phases of one case, and where the value of each reduction is kept between them."""

    phases: tuple[Phase, ...]
    sums: Mapping[Expr, int]


def build_schedule(case: Case) -> Schedule:
    """Assign every reduction and store of ``case`` to its phase."""
    case = reduce_divisions(case)
    roots = case.roots
    level = levels(roots, dict(case.temps))
    uniform = uniform_set(roots)
    reductions = [expr for expr in postorder(roots) if isinstance(expr, Reduce)]
    reductions.sort(key=lambda expr: expr not in case.sums)
    last = max(level.values(), default=0)
    last = max([last, case.not_before, *(term.phase for term in case.terms)])
    phases = tuple(Phase() for _ in range(last + 1))
    for reduction in reductions:
        phases[level[reduction] - 1].reductions.append(reduction)
    for store in case.stores:
        at = level[store.value] if store.buffer in case.early else last
        phase = phases[at]
        (phase.uniform_stores if store.value in uniform else phase.stores).append(store)
    for term in case.terms:
        phases[term.phase].terms.append(term)
    for phase in phases:
        loops = [r.operand for r in phase.reductions] + [store.value for store in phase.stores]
        phase.uniforms = _outermost_uniforms(loops, uniform)
    return Schedule(phases, {expr: index for index, expr in enumerate(reductions)})


def settled_phase(expr: Expr, available: Mapping[str, int]) -> int:
    """Return the phase at whose end the uniform ``expr`` is known; ``available`` as in levels."""
    level = levels([expr], available)
    known: dict[Expr, int] = {}
    for item in postorder([expr]):
        if isinstance(item, Reduce):
            known[item] = level[item] - 1
        else:
            known[item] = max([known[arg] for arg in item.args] or [level[item]])
    return known[expr]


def reduce_divisions(case: Case) -> Case:
    """Replace divisions of elements by uniform values; they cost several times a product.

    ``div_by(x, y, 1 / y)`` rounds as ``x / y`` does, and one division a tensor remains.
    """
    roots = case.roots
    uniform = uniform_set(roots)
    done: dict[Expr, Expr] = {}
    for expr in postorder(roots):
        done[expr] = substitute([expr], done)[0] if expr.args else expr
        if isinstance(expr, Apply) and expr.op == "div" and expr not in uniform:
            x, y = (done[arg] for arg in expr.args)
            if expr.args[1] in uniform:
                r = apply("div", constant(1.0, y.dtype), y, dtype=y.dtype)
                done[expr] = apply("div_by", x, y, r, dtype=expr.dtype)
    stores = tuple(Store(store.buffer, done[store.value]) for store in case.stores)
    sums = tuple(done[value] for value in case.sums)
    terms = tuple(replace(term, value=done[term.value]) for term in case.terms)
    return replace(case, stores=stores, sums=sums, terms=terms)  # type: ignore[arg-type]  # Reduce


def _outermost_uniforms(roots: Iterable[Expr], uniform: set[Expr]) -> list[Expr]:
    """Return the uniform values that element loops read, in postorder; literals are none."""
    roots = list(roots)
    read = {root for root in roots if root in uniform}
    for expr in postorder(roots):
        if expr not in uniform and not isinstance(expr, Load):
            read.update(arg for arg in expr.args if arg in uniform)
    return [e for e in postorder(roots) if e in read and not isinstance(e, Constant)]


def count_phases(kernel: Kernel) -> int:
    """Return the number of phases that the longest case of ``kernel`` has."""
    return max(len(build_schedule(case).phases) for case in kernel.cases)


def count_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes that ``case`` reads and writes for one element, over all phases."""
    reads = writes = 0
    for phase in build_schedule(case).phases:
        roots = [r.operand for r in phase.reductions] + [store.value for store in phase.stores]
        reads += sum(BYTES[e.dtype] for e in _loads(roots, set(phase.uniforms)))
        writes += sum(BYTES[store.value.dtype] for store in phase.stores)
    return reads, writes


def _loads(roots: Iterable[Expr], known: set[Expr]) -> set[Load]:
    """Return the loads under ``roots`` that are not below a value in ``known``."""
    seen: set[Expr] = set(known)
    stack = [root for root in roots if root not in known]
    while stack:
        expr = stack.pop()
        if expr not in seen:
            seen.add(expr)
            stack.extend(expr.args)
    return {expr for expr in seen - known if isinstance(expr, Load)}


def leaves(case: Case) -> list[Expr]:
    """Return the ``Load`` and ``Scalar`` leaves of ``case``."""
    roots = case.roots
    return [e for e in postorder(roots) if isinstance(e, (Load, Scalar))]
