"""What the update of classes of parameters computes, from traces of a few representatives of each.

If the graph falls into independent and equal parts, one expression serves every tensor of a class;
totals over all tensors are leaves of it. Branches on state or data are followed both ways and
joined by a select; branches on hyperparameters become guards, which say when to trace again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.utils._pytree import tree_leaves

from mpcompile.codegen.expr import Expr, postorder, select
from mpcompile.codegen.extract import Extractor
from mpcompile.codegen.values import NOBODY, Call, Extracted, Value
from mpcompile.errors import CodegenError
from mpcompile.runtime.coupling import (
    Coupled,
    Couplings,
    Total,
    brief,
    leaf_name,
    local_name,
    localize,
    owners,
    tensors,
)
from mpcompile.runtime.guards import Guard
from mpcompile.runtime.tracing import StepTrace

MAX_PATHS = 8
Tracer = Callable[[tuple[bool, ...]], StepTrace]


@dataclass(frozen=True)
class Analysis:
    """The update of a class. ``results`` maps leaf names (param, state.x) to new values.

    ``totals`` are those of all classes together; ``number`` is that of this one among them.
    ``group_results`` are the numbers of groups that the step changes, with their owner.
    """

    results: Mapping[str, Expr]
    guards: tuple[Guard, ...]
    calls: tuple[Call, ...]
    reads_shape: bool
    totals: tuple[Total, ...] = ()
    number: int = 0
    group_results: tuple[tuple[str, Expr], ...] = ()


@dataclass(frozen=True)
class _Choice:
    """A branch on state or data, with the outcome that this path took.

    It was made at ``position`` for the parameter ``owner``, and as ``again`` for another one.
    """

    position: int
    condition: Expr
    value: bool
    owner: int | None
    again: _Choice | None = None


Results = Mapping[tuple[int, str], Expr]
"""New values by class and leaf name."""


@dataclass(frozen=True)
class _Path:
    results: Results
    choices: tuple[_Choice, ...]
    guards: tuple[Guard, ...]
    calls: Mapping[int, tuple[Call, ...]]
    outcomes: tuple[bool, ...]
    reads_shape: bool


def analyze(trace: Tracer) -> Analysis:
    """Trace every path through the step and join them, for one class that stands alone.

    Raises:
        Coupled: the representatives are coupled.
        CodegenError: they differ, a state-dependent number was baked in, or there are too many
            paths.
    """
    (analysis,) = analyze_whole(trace, [0])
    if analysis.totals or analysis.group_results:
        raise Coupled("fuse-updates: the step couples parameters.")
    return analysis


def analyze_whole(trace: Tracer, groups: Sequence[int]) -> list[Analysis]:
    """Trace every path through the step and join them; return the update of each class.

    Args:
        trace: traces the step of all classes together.
        groups: the group of each class, as a position among the groups that are traced.

    Raises:
        CodegenError: as for ``analyze``, or the classes are coupled in a way that has no kernel.
    """
    walk = _Walk(trace, groups)
    results = walk.explore()
    if any(walk.calls.values()) and (walk.num_paths > 1 or walk.totals):
        what = "couples its parameters" if walk.totals else "branches on state"
        raise CodegenError(f"fuse-updates: the step {what} around whole-tensor operations.")
    totals = tuple(walk.totals)
    shared = tuple((name, value) for (c, name), value in results.items() if c == NOBODY)
    return [
        Analysis(
            {name: value for (c, name), value in results.items() if c == number},
            tuple(guard for guard in walk.guards if guard.group == group),
            walk.calls.get(number, ()),
            walk.reads_shape,
            totals,
            number,
            shared,
        )
        for number, group in enumerate(groups)
    ]


class _Walk:
    """One walk over all paths; what they have in common is collected here."""

    def __init__(self, trace: Tracer, groups: Sequence[int]) -> None:
        self._trace, self._groups = trace, groups
        self.guards: dict[Guard, None] = {}
        self.calls: dict[int, tuple[Call, ...]] = {}
        self.totals: list[Total] = []
        self.num_paths, self.reads_shape = 0, False

    def explore(self) -> Results:
        """Return the results of all paths through the step."""
        return self._explore((), 0)[1]

    def _explore(self, forced: tuple[bool, ...], depth: int) -> tuple[_Path, Results]:
        """Return the path that starts as ``forced`` says, and the results of all beside it."""
        self.num_paths += 1
        if self.num_paths > MAX_PATHS:
            raise CodegenError(
                f"fuse-updates: the step has more than {MAX_PATHS} paths through branches on state."
            )
        path = self._trace_path(forced)
        self.reads_shape |= path.reads_shape
        self.guards.update(dict.fromkeys(path.guards))
        for number, calls in path.calls.items():
            known = self.calls.get(number, ())
            self.calls[number] = (*known, *(call for call in calls if call not in known))
        return path, self._join(path, depth)

    def _join(self, path: _Path, depth: int) -> Results:
        if depth == len(path.choices):
            return path.results
        choice = path.choices[depth]
        forced = (*path.outcomes[: choice.position], not choice.value)
        other_path, other = self._explore(forced, depth + 1)
        self._check_apart(choice, path, other_path)
        same = self._join(path, depth + 1)
        yes, no = (same, other) if choice.value else (other, same)
        if set(yes) != set(no):
            raise CodegenError(
                "fuse-updates: whether the step changes a number of its group depends on state."
            )
        return {name: select(choice.condition, yes[name], no[name]) for name in yes}

    def _check_apart(self, choice: _Choice, path: _Path, other: _Path) -> None:
        """Raise if the branch that one parameter takes changes what another one becomes.

        In ``path`` and ``other`` all parameters take the same; here two of them part.
        """
        if choice.again is None:
            return
        step = self._trace((*path.outcomes[: choice.again.position], not choice.value))
        found = self._per_owner(step, self._extract(step))
        for owner, alone in ((choice.owner, path), (choice.again.owner, other)):
            assert owner is not None
            number = step.classes[owner]
            if any(alone.results[number, name] is not e for name, e in found[owner].items()):
                raise CodegenError(
                    f"fuse-updates: a branch of one parameter ({brief(choice.condition)}) changes "
                    "the update of another one."
                )

    def _extract(self, step: StepTrace) -> Extracted:
        """Return what ``step`` computes; each value reads one representative at most."""
        found = Extractor(step.leaves, step.shapes).run(step.gm)
        couplings = Couplings(step.classes, self.totals)
        found.outputs = [replace(v, expr=couplings.resolve(v.expr)) for v in found.outputs]
        return found

    def _trace_path(self, forced: tuple[bool, ...]) -> _Path:
        """Trace until every representative takes the same path; each try settles one branch."""
        for _ in range(4 * MAX_PATHS):
            step = self._trace(forced)
            found = self._extract(step)
            conditions = found.outputs[len(step.outputs) :]
            outcomes: list[bool] = []
            choices: dict[Expr, _Choice] = {}
            guards: list[Guard] = []
            conflict = False
            for made, value in zip(step.decisions.made, conditions, strict=True):
                condition = localize(value.expr)
                mine = _Choice(
                    len(outcomes),
                    condition,
                    bool(made.value),
                    max(tensors(value.expr), default=None),
                )
                if not isinstance(made.value, bool) or not _reads_data(value.expr):
                    guards.append(self._guard(value.expr, made.value))
                elif condition not in choices:
                    self._check_group(value.expr, self._group_of(value.expr, step.classes))
                    choices[condition] = mine
                elif choices[condition].value != made.value:
                    forced, conflict = (*outcomes, not made.value), True
                    break
                elif choices[condition].again is None and choices[condition].owner != mine.owner:
                    choices[condition] = replace(choices[condition], again=mine)
                if isinstance(made.value, bool):
                    outcomes.append(made.value)
            if not conflict:
                results = self._same_results(step, found)
                calls = _same_calls(step, found)
                ordered = tuple(choices.values())
                return _Path(
                    results, ordered, tuple(guards), calls, tuple(outcomes), step.reads_shape
                )
        raise CodegenError("fuse-updates: the representatives do not take the same path.")

    def _check_group(self, expr: Expr, group: int | None) -> None:
        """Raise if ``expr`` reads numbers of another group than ``group``."""
        groups = {int(owner[1:]) for owner in owners(expr) if not owner.isdecimal()}
        if groups - {group}:
            raise CodegenError(
                "fuse-updates: the update of one group reads numbers of another one "
                f"({brief(expr)})."
            )

    def _group_of(self, expr: Expr, classes: Sequence[int]) -> int | None:
        """Return the group of all tensors that ``expr`` reads; without any, the only group."""
        numbers = {classes[owner] for owner in tensors(expr)} or set(classes)
        groups = {self._groups[number] for number in numbers}
        return groups.pop() if len(groups) == 1 else None

    def _guard(self, condition: Expr, outcome: float) -> Guard:
        if _reads_data(condition):
            raise CodegenError(
                f"fuse-updates: Python computes with {localize(condition)} where it cannot be "
                f"traced, so its value of the moment ({outcome}) would be baked in."
            )
        groups = {int(owner[1:]) for owner in owners(condition)} or {self._groups[0]}
        if len(groups) > 1 or not groups <= set(self._groups):
            raise CodegenError(
                f"fuse-updates: Python branches on {localize(condition)} of several groups, or of "
                "one without gradients."
            )
        return Guard(localize(condition), outcome, groups.pop())

    def _per_owner(self, step: StepTrace, found: Extracted) -> list[dict[str, Expr]]:
        """Return what the leaves of each representative become."""
        per_owner: list[dict[str, Expr]] = [{} for _ in step.shapes]
        for leaf, value in zip(step.outputs, found.outputs, strict=False):
            if leaf.owner == NOBODY:
                continue
            if tensors(value.expr) - {leaf.owner}:
                raise CodegenError(
                    f"fuse-updates: {local_name(leaf.name)} of one parameter depends on another."
                )
            self._check_group(value.expr, self._groups[step.classes[leaf.owner]])
            per_owner[leaf.owner][local_name(leaf.name)] = localize(value.expr)
        return per_owner

    def _same_results(self, step: StepTrace, found: Extracted) -> Results:
        """Return what the leaves of each class become, if all its representatives agree."""
        results: dict[tuple[int, str], Expr] = {}
        for leaf, value in zip(step.outputs, found.outputs, strict=False):
            if leaf.owner == NOBODY and leaf_name(value.expr) != leaf.name:
                results[NOBODY, leaf.name] = value.expr
        for number, mine in zip(step.classes, self._per_owner(step, found), strict=True):
            for name, expr in mine.items():
                if results.setdefault((number, name), expr) is not expr:
                    raise Different(
                        "fuse-updates: the updates of two parameters of one class differ."
                    )
        return results


def _reads_data(expr: Expr) -> bool:
    """Whether ``expr`` reads a tensor or a total, and not hyperparameters only."""
    names = [leaf_name(leaf) or "" for leaf in postorder([expr])]
    return bool(tensors(expr)) or any(name.startswith("total.") for name in names)


class Different(CodegenError):
    """Two representatives do not share one expression; classes have to be finer."""


def _same_calls(step: StepTrace, found: Extracted) -> dict[int, tuple[Call, ...]]:
    """Return the calls of each class, if all its representatives make the same."""
    per_owner = [tuple(found.calls.get(owner, ())) for owner in range(len(step.shapes))]
    for owner, calls in enumerate(per_owner):
        values = [a for call in calls for a in tree_leaves((call.args, dict(call.kwargs)))]
        if any(isinstance(v, Value) and tensors(v.expr) - {owner} for v in values):
            raise CodegenError("fuse-updates: a whole-tensor operation reads two parameters.")
    by_class: dict[int, tuple[Call, ...]] = {}
    for number, calls in zip(step.classes, per_owner, strict=True):
        local = tuple(map(_local_call, calls))
        if by_class.setdefault(number, local) != local:
            raise Different("fuse-updates: two parameters of one class need different ATen calls.")
    return by_class


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
