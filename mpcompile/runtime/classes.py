"""Sort an optimizer's parameters into classes that share one update, and keep the analyses.

An analysis belongs to a structure (dtypes, dimensions, kinds of state, flags of the group) and
holds while its guards do. If the step reads shapes, or two representatives turn out to differ,
classes are made finer: one for each shape. If parameters turn out to be coupled, representatives of
all classes are traced together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpcompile.errors import CodegenError
from mpcompile.runtime.analysis import (
    Analysis,
    Different,
    analyze,
    analyze_whole,
)
from mpcompile.runtime.coupling import Coupled
from mpcompile.runtime.guards import Guard, check_on_host, guards_hold
from mpcompile.runtime.machines import machine_of
from mpcompile.runtime.structure import (
    GroupStructure,
    ParamStructure,
    attributes,
    describe_group,
    describe_state,
    flat_items,
)
from mpcompile.runtime.tracing import Representative, TracedGroup, trace_step

MAX_VARIANTS = 8
MAX_COUPLED_CLASSES = 16
_Key = tuple[ParamStructure, int]
"""A structure and the group it is met in."""


@dataclass(frozen=True)
class Member:
    """A parameter with a gradient, and the group it is in."""

    param: torch.Tensor
    group: int


class _Values(dict[str, float]):
    """Numbers by leaf name."""

    def __missing__(self, name: str) -> float:
        raise CodegenError(
            f"fuse-updates: Python branches on {name.removeprefix('group.')!r}, a tensor of the "
            "device, for which the host would have to wait at every step."
        )


def group_tensors(group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``group`` by leaf name."""
    items = flat_items(group)
    return {f"group.{path}": value for path, value in items if isinstance(value, torch.Tensor)}


def group_values(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of ``group`` by leaf name; 0-dim tensors are read.

    Tensors of another device are left out: to read them the host would have to wait.
    """
    values = _Values()
    for path, value in flat_items(group):
        if isinstance(value, torch.Tensor):
            machine = machine_of(value.device)
            if machine is None or machine.on_host(value):
                values[f"group.{path}"] = value.item()
        elif isinstance(value, (int, float)):
            values[f"group.{path}"] = value
    return values


class Classes:
    """The analyses of one optimizer, made when a structure is first met."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._variants: dict[ParamStructure, list[Analysis]] = {}
        self._by_shape: set[ParamStructure] = set()
        self._whole: dict[frozenset[_Key], list[dict[_Key, Analysis]]] = {}
        self._is_coupled = self._whole_by_shape = False
        self._attributes = attributes(optimizer)
        self.num_traces = 0

    def of(self, optimizer: torch.optim.Optimizer) -> Classes:
        """Return these classes for a copy of the optimizer."""
        same = Classes(optimizer)
        same._variants, same._by_shape, same._whole = self._variants, self._by_shape, self._whole
        same._is_coupled, same._whole_by_shape = self._is_coupled, self._whole_by_shape
        return same

    def sort(self, members: Sequence[Member]) -> list[tuple[ParamStructure, Analysis]]:
        """Return the structure and the analysis of each member.

        Raises:
            StateMissing: the optimizer has to make its state first.
            CodegenError: there is no kernel for the update; the message says why.
        """
        self._forget_if_stale()
        groups = [describe_group(group) for group in self._optimizer.param_groups]
        values = [group_values(group) for group in self._optimizer.param_groups]
        structures = [self._structure(member, groups[member.group]) for member in members]
        if not self._is_coupled:
            try:
                return self._sort_apart(members, structures, values)
            except Coupled:
                self._is_coupled = True
        return self._sort_whole(members, structures, groups, values)

    def _forget_if_stale(self) -> None:
        """Drop all analyses if numbers that the optimizer keeps as attributes changed."""
        now = attributes(self._optimizer)
        if self._attributes != now:
            self._attributes = now
            for kept in (self._variants, self._by_shape, self._whole):
                kept.clear()
            self._is_coupled = self._whole_by_shape = False

    def _sort_apart(
        self,
        members: Sequence[Member],
        structures: Sequence[ParamStructure],
        values: Sequence[Mapping[str, float]],
    ) -> list[tuple[ParamStructure, Analysis]]:
        """Sort parameters whose updates are independent."""
        samples: dict[_Key, list[Member]] = {}
        for member, structure in zip(members, structures, strict=True):
            samples.setdefault((structure, member.group), []).append(member)
        found = {key: self._find(key[0], sample, values[key[1]]) for key, sample in samples.items()}
        out = []
        for member, structure in zip(members, structures, strict=True):
            analysis = found[structure, member.group]
            if isinstance(analysis, Mapping):
                shape = tuple(member.param.shape)
                out.append((replace(structure, shape=shape), analysis[shape]))
            else:
                out.append((structure, analysis))
        return out

    def _sort_whole(
        self,
        members: Sequence[Member],
        structures: Sequence[ParamStructure],
        groups: Sequence[GroupStructure],
        values: Sequence[Mapping[str, float]],
    ) -> list[tuple[ParamStructure, Analysis]]:
        """Sort parameters of which each one's update depends on all."""
        keys: list[_Key] = []
        for member, structure in zip(members, structures, strict=True):
            shape = tuple(member.param.shape) if self._whole_by_shape else ()
            keys.append((replace(structure, shape=shape), member.group))
        classes: dict[_Key, list[Member]] = {}
        for member, key in zip(members, keys, strict=True):
            classes.setdefault(key, []).append(member)
        variants = self._whole.setdefault(frozenset(classes), [])
        for variant in variants:
            if all(guards_hold(a.guards, values[group]) for (_, group), a in variant.items()):
                return [(key[0], variant[key]) for key in keys]
        _check_number(variants, [g for v in variants[-1:] for a in v.values() for g in a.guards])
        try:
            found = self._trace_whole(classes, groups)
        except Different:
            found = {}
        if not found or any(analysis.reads_shape for analysis in found.values()):
            if not self._whole_by_shape:
                self._whole_by_shape = True
                return self._sort_whole(members, structures, groups, values)
            if not found:
                raise Different("fuse-updates: the updates of two parameters of one shape differ.")
        variants.append(found)
        return [(key[0], found[key]) for key in keys]

    def _trace_whole(
        self, classes: Mapping[_Key, list[Member]], groups: Sequence[GroupStructure]
    ) -> dict[_Key, Analysis]:
        """Trace all classes together, with two and with three parameters of each.

        What depends on how many there are beyond sums and maxima over them shows up as a
        difference.
        """
        if len(classes) > MAX_COUPLED_CLASSES:
            raise CodegenError(
                f"fuse-updates: the step couples {len(classes)} kinds of parameters; at most "
                f"{MAX_COUPLED_CLASSES} are traced together."
            )
        traced = [
            TracedGroup(entries, structure, f"g{index}:")
            for index, (entries, structure) in enumerate(
                zip(self._optimizer.param_groups, groups, strict=True)
            )
        ]
        found: list[list[Analysis]] = []
        for count in (2, 3):
            self.num_traces += 1
            reps = [
                self._representative(member, key[0], key[1], number)
                for number, (key, members) in enumerate(classes.items())
                for member in _spread(members, count)
            ]
            trace = functools.partial(trace_step, self._optimizer, traced, reps)
            found.append(analyze_whole(trace, [group for _, group in classes]))
        if found[0] != found[1]:
            raise CodegenError(
                "fuse-updates: the update depends on how many parameters the optimizer has, beyond "
                "sums and maxima over them."
            )
        for analysis in found[0]:
            _check_changes(analysis)
            check_on_host(analysis.group_results)
        tensors = {f"g{i}:group.{path}" for i, g in enumerate(groups) for path, _ in g.tensors}
        for name, _ in found[0][0].group_results:
            if name in tensors:
                raise CodegenError(
                    f"fuse-updates: the step changes {name.partition('.')[2]!r} of its group, a "
                    "tensor."
                )
        return dict(zip(classes, found[0], strict=True))

    def _representative(
        self, member: Member, structure: ParamStructure, group: int = 0, number: int = 0
    ) -> Representative:
        state = dict(self._optimizer.state.get(member.param, {}))
        return Representative(member.param, state, structure, group, number)

    def _structure(self, member: Member, group: GroupStructure) -> ParamStructure:
        param = member.param
        state = self._optimizer.state.get(param, {})
        return ParamStructure(group, param.dtype, param.dim(), describe_state(param, state))

    def _find(
        self, structure: ParamStructure, members: Sequence[Member], values: Mapping[str, float]
    ) -> Analysis | dict[tuple[int, ...], Analysis]:
        """Return the analysis for ``members``, or one for each of their shapes."""
        if structure not in self._by_shape:
            try:
                analysis = self._variant(structure, members, values)
            except Different:
                self._by_shape.add(structure)
            else:
                if not analysis.reads_shape:
                    return analysis
                self._by_shape.add(structure)
        by_shape: dict[tuple[int, ...], list[Member]] = {}
        for member in members:
            by_shape.setdefault(tuple(member.param.shape), []).append(member)
        return {
            shape: self._variant(replace(structure, shape=shape), same, values)
            for shape, same in by_shape.items()
        }

    def _variant(
        self, structure: ParamStructure, members: Sequence[Member], values: Mapping[str, float]
    ) -> Analysis:
        variants = self._variants.setdefault(structure, [])
        for analysis in variants:
            if guards_hold(analysis.guards, values):
                return analysis
        _check_number(variants, variants[-1].guards if variants else ())
        self.num_traces += 1
        group = self._optimizer.param_groups[members[0].group]
        groups = [TracedGroup(group, structure.group)]
        reps = [self._representative(member, structure) for member in _spread(members, 2)]
        analysis = analyze(lambda forced: trace_step(self._optimizer, groups, reps, forced))
        _check_changes(analysis)
        variants.append(analysis)
        return analysis


def _spread(members: Sequence[Member], count: int) -> list[Member]:
    """Return ``count`` of ``members``, of two shapes if there are two; the last may repeat."""
    first = members[0]
    other = next((m for m in members if m.param.shape != first.param.shape), members[-1])
    return [first, other, *members[1:], *([other] * count)][:count]


def _check_number(variants: Sequence[object], guards: Sequence[Guard]) -> None:
    """Raise CodegenError if a class was traced too often already."""
    if len(variants) == MAX_VARIANTS:
        what = guards[-1].condition if guards else "a value"
        raise CodegenError(
            f"fuse-updates: the step was traced {MAX_VARIANTS} times because Python computes "
            f"with {what}, which keeps changing."
        )


def _check_changes(analysis: Analysis) -> None:
    if all(str(value) in (name, f"{name}[i]") for name, value in analysis.results.items()):
        raise CodegenError(
            "fuse-updates: the step changes no parameter and no state that it finds in its groups; "
            "it keeps references of its own."
        )
