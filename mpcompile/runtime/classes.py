"""Sort an optimizer's parameters into classes that share one update, and keep the analyses.

An analysis belongs to a structure (dtypes, dimensions, kinds of state, flags of the group) and
holds while its guards do. If the step reads shapes, or two representatives turn out to differ,
classes are made finer: one for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpcompile.errors import CodegenError
from mpcompile.runtime.analysis import Analysis, Different, analyze, guards_hold
from mpcompile.runtime.structure import (
    GroupStructure,
    ParamStructure,
    describe_group,
    describe_state,
    flat_items,
)
from mpcompile.runtime.tracing import Representative, trace_step

MAX_VARIANTS = 8


@dataclass(frozen=True)
class Member:
    """A parameter with a gradient, and the group it is in."""

    param: torch.Tensor
    group: int


def group_values(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of ``group`` by leaf name; 0-dim tensors are read."""
    values: dict[str, float] = {}
    for path, value in flat_items(group):
        if isinstance(value, torch.Tensor):
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
        self.num_traces = 0

    def of(self, optimizer: torch.optim.Optimizer) -> Classes:
        """Return these classes for a copy of the optimizer."""
        same = Classes(optimizer)
        same._variants, same._by_shape = self._variants, self._by_shape
        return same

    def sort(self, members: Sequence[Member]) -> list[tuple[ParamStructure, Analysis]]:
        """Return the structure and the analysis of each member.

        Raises:
            StateMissing: the optimizer has to make its state first.
            CodegenError: there is no kernel for the update; the message says why.
        """
        groups = [describe_group(group) for group in self._optimizer.param_groups]
        values = [group_values(group) for group in self._optimizer.param_groups]
        structures = [self._structure(member, groups[member.group]) for member in members]
        samples: dict[tuple[ParamStructure, int], list[Member]] = {}
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
        if len(variants) == MAX_VARIANTS:
            guard = variants[-1].guards[-1] if variants[-1].guards else None
            raise CodegenError(
                f"fuse-updates: the step was traced {MAX_VARIANTS} times because Python computes "
                f"with {guard.condition if guard else 'a value'}, which keeps changing."
            )
        self.num_traces += 1
        first = members[0]
        other = next((m for m in members if m.param.shape != first.param.shape), members[-1])
        group = self._optimizer.param_groups[first.group]
        reps = [
            Representative(m.param, dict(self._optimizer.state.get(m.param, {})), structure)
            for m in (first, other)
        ]
        analysis = analyze(
            lambda forced: trace_step(self._optimizer, group, structure.group, reps, forced)
        )
        if str(analysis.results["param"]) in ("param", "param[i]"):
            raise CodegenError(
                "fuse-updates: the step changes no parameter that it finds in its groups; it keeps "
                "references of its own."
            )
        variants.append(analysis)
        return analysis
