"""One ready update: a kernel, its table and everything to check before a launch.

It is made for one set of parameters with gradients and one way to treat these. A launch checks that
Python objects and layouts still hold, reads hyperparameters, takes pointers, and runs the kernel.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import emit_cpp, measure
from mpcompile.codegen.expr import Load, Scalar
from mpcompile.codegen.schedule import count_bytes, count_phases, leaves
from mpcompile.codegen.values import NUM_ELEMENTS
from mpcompile.errors import CodegenError
from mpcompile.runtime.calls import CallRunner
from mpcompile.runtime.cases import OWN_FACTOR, PlannedCase, build_kernel
from mpcompile.runtime.classes import Classes, Member, group_tensors
from mpcompile.runtime.device_rows import DeviceRows
from mpcompile.runtime.grads import OwnGrads
from mpcompile.runtime.handles import can_read_grads
from mpcompile.runtime.host_part import ON_DEVICE, split_all, state_key
from mpcompile.runtime.late_state import LATE, LatePart, LateState
from mpcompile.runtime.machines import is_awaited, machine_of
from mpcompile.runtime.planning import (
    GradTreatment,
    check_same_device,
    check_supported,
    plan_members,
)
from mpcompile.runtime.record import KernelRecord
from mpcompile.runtime.staging import Staging
from mpcompile.runtime.table import Located, Locator, Rows, build_chunks, independent_runs
from mpcompile.runtime.tracing import StateMissing
from mpcompile.runtime.watched_optimizer import WatchedOptimizer

Number = float | torch.Tensor
"""A number of a launch; a tensor is one that only the device knows."""


@dataclass(frozen=True)
class _Number:
    """A Python number in the state of a row."""

    position: int
    entries: dict[str, Any]
    key: str
    is_int: bool
    is_stored: bool


class Prepared:
    """A kernel and its table for ``members``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        classes: Classes,
        members: Sequence[Member],
        grads: Sequence[torch.Tensor],
        treatment: GradTreatment,
        copies: dict[torch.Tensor, torch.Tensor],
        cache_dir: Path | None,
        late: LateState | None = None,
    ) -> None:
        self._optimizer, self.members, self.cache_dir = optimizer, list(members), cache_dir
        check_supported(members, grads)
        sorted_members = classes.sort(members)
        self._analyses = [(m.group, a) for m, (_, a) in zip(members, sorted_members, strict=True)]
        planned = plan_members(members, grads, sorted_members, treatment, copies)
        self.machine = machine_of(members[0].param.device)
        if self.machine is not None:
            if self.machine.is_capturing():
                raise StateMissing("fuse-updates: a CUDA graph is captured before the first step.")
            if any(analysis.totals for _, analysis in self._analyses):
                raise CodegenError(
                    "fuse-updates: a step that couples its parameters has no CUDA kernel."
                )
            planned = split_all(planned, members, optimizer, self.machine, treatment.may_skip)
        if late is None and self.machine is not None and any(plan.late for plan in planned):
            late = LateState(optimizer, self.machine)
        self.cases = list(dict.fromkeys(planned))
        name = f"{type(optimizer).__name__}: {_count(len(self.cases), 'kind')} of tensors"
        sizes = [member.param.numel() for member in members]
        kinds = [self.cases.index(case) for case in planned]
        self._load(name, (sizes, kinds, [member.group for member in members]))
        self.norm_tables: dict[Any, Any] = {}
        self.own_factors: Sequence[float] = ()
        self.current_grads: Sequence[torch.Tensor] = grads
        self._params = [member.param for member in members]
        self.own_grads = OwnGrads(self._params)
        self._can_read_grads = can_read_grads() and not any(p.is_inference() for p in self._params)
        with_grad = set(map(id, self._params))
        self._without = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) not in with_grad
        ]
        self.late: LatePart | None = None
        self._late_places: dict[tuple[int, str], torch.Tensor] = {}
        if late is not None and any(plan.late for plan in planned):
            self.late = self._late_part(planned, late)
        self._fill(planned, grads, copies)
        if isinstance(self.rows, DeviceRows):
            self.rows.kept += [copy for _, copy in self.staging.inward]
            self.rows.kept += self.staging.grads.values()
        shared = (self.kernel.shared, self.rows.shared)
        on_device = self.machine is not None
        self._watched = WatchedOptimizer(optimizer, self._analyses, shared, on_device, cache_dir)
        self.calls = CallRunner(self, planned) if any(p.calls for p in planned) else None

    @property
    def leaves_numbers(self) -> bool:
        """Whether the step writes numbers into its parameter groups."""
        return bool(self._analyses[0][1].group_results)

    def _load(self, name: str, shape: tuple[list[int], list[int], list[int]]) -> None:
        """Make the kernel and its rows; ``shape`` holds their sizes, kinds and groups."""
        self.rows: Rows
        self._function: Any
        if self.machine is not None:
            rows = DeviceRows(name, self.cases, *shape, self.machine, self.cache_dir)
            self.rows, self.kernel, self.source = rows, rows.kernel, rows.source
            self._function, self.was_cached = rows.module, rows.module.cached
            self.phases = rows.phases
            return
        ops = [total.op for _, analysis in self._analyses[:1] for total in analysis.totals]
        self.kernel = build_kernel(name, [case.case for case in self.cases], ops)
        self.source = emit_cpp(self.kernel)
        built = build_library(self.source, self.cache_dir)
        self._function, self.was_cached = built.library.run, built.cached
        self.phases = count_phases(self.kernel)
        self.rows = Rows(self.kernel, measure(self.kernel), *shape, build_chunks(shape[0]))

    def _late_part(self, planned: Sequence[PlannedCase], late: LateState) -> LatePart:
        """Find the device's numbers for what it counts in the place of the host."""
        places = [(row, state_key(name)) for row, plan in enumerate(planned) for name in plan.late]
        state = [self._optimizer.state[self.members[row].param] for row, _ in places]
        slots = late.slots_for([(s, key) for s, (_, key) in zip(state, places, strict=True)])
        self._late_places = {at: late.place(s) for at, s in zip(places, slots, strict=True)}
        return LatePart(late, self.rows, slots, places)

    def _fill(
        self,
        planned: Sequence[PlannedCase],
        grads: Sequence[torch.Tensor],
        copies: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        """Find every tensor and number that the rows need."""
        self.staging, self.layouts = Staging(), []
        fixed, numbers = Located(), list[_Number]()
        written: list[list[torch.Tensor]] = []
        for row, (member, plan) in enumerate(zip(self.members, planned, strict=True)):
            like = self.staging.row_layout(member.param)
            self.layouts.append(like)
            state = self._optimizer.state.get(member.param, {})
            stored = {store.buffer for case in (plan.case, plan.host) for store in case.stores}
            needed = {_name(leaf) for c in (plan.case, plan.host) for leaf in leaves(c)} | stored
            group = self._optimizer.param_groups[member.group]
            mine = []
            for name in sorted(needed):
                late = self._late_places.get((row, name.removeprefix(LATE)))
                is_late = name.startswith(LATE)
                tensor = late if is_late else _tensor_of(name, member.param, group, state, copies)
                if name.startswith("number."):
                    self._add_number(numbers, row, name, state, name in stored)
                elif tensor is not None:
                    if tensor.dim():
                        check_same_device(name, tensor, member.param)
                        tensor = self.staging.placed(tensor, like, name in stored)
                    place = self.rows.place(row, name)
                    if name == "copy":  # ours, and stays where it is
                        self.rows.pointers[place] = tensor.data_ptr()
                    else:
                        fixed.add(tensor, place)
                    mine += [tensor] if name in stored else []
            written.append(mine)
        self.numbers, self._written = numbers, written
        placed = [self._place_grad(row, grad) for row, grad in enumerate(grads)]
        owners = (self._params, self._without)
        self.locator = Locator(self.rows, fixed, placed, owners, self.cache_dir)
        self._runs: list[tuple[int, int]] | None = None

    def _add_number(
        self, numbers: list[_Number], row: int, name: str, state: dict[str, Any], is_stored: bool
    ) -> None:
        columns = self.kernel.numbers
        position = row * len(columns) + columns.index(name)
        if name == f"number.{NUM_ELEMENTS}":
            self.rows.numbers[position] = self.members[row].param.numel()
        elif name.startswith("number.state."):
            key = name.removeprefix("number.state.")
            numbers.append(_Number(position, state, key, isinstance(state[key], int), is_stored))

    def _place_grad(self, row: int, grad: torch.Tensor) -> torch.Tensor:
        """Return ``grad``, or its copy in the order of the row, which later launches reuse."""
        copy = self.staging.grads.get(row)
        if copy is not None:
            return copy.copy_(grad)
        placed = self.staging.placed(grad, self.layouts[row], written=False)
        if placed is not grad:
            self.staging.inward.pop()
            self.staging.grads[row] = placed.copy_(grad)
        return placed

    def is_current(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether the table still describes the optimizer and fits ``grads``; takes pointers.

        With ``own_grads`` no Python object of a parameter or a gradient is looked at, and the
        parameters count as changed.
        """
        if not self._watched.is_current():
            return False
        is_own = grads is self.own_grads
        if is_own and (self.staging.grads or not self._can_read_grads):
            return False
        same, moved = self.locator.locate(is_own)
        if not same:
            return False
        if is_own:
            return self._find_runs(moved)
        if self.staging.grads:
            grads = [
                self._place_grad(row, grad) if row in self.staging.grads else grad
                for row, grad in enumerate(grads)
            ]
        if not self.locator.locate_grads(grads):
            return False
        return self._find_runs(moved)

    def _find_runs(self, moved: bool) -> bool:
        """Find out which rows share memory, if that may have changed."""
        if moved or self._runs is None:
            self._runs = independent_runs([_ranges(tensors) for tensors in self._written])
        return True

    def take_factors(self, factors: Sequence[float]) -> None:
        """Have the next launch, and norms before it, multiply each gradient by a number first."""
        self.own_factors = factors
        if factors:
            self.rows.put_numbers(OWN_FACTOR, factors)

    def take_skip(self, skip: torch.Tensor | None) -> bool:
        """Have the next launch read ``skip``; return whether it is to run.

        The host reads it where that is no wait. For a device it waits only where it keeps what a
        skip must not change and the device does not count for itself.
        """
        rows = self.rows
        if not isinstance(rows, DeviceRows):
            return skip is None or not bool(skip.item())
        takes_skip = rows.takes_skip and not self.leaves_numbers
        if skip is not None and not (takes_skip and is_awaited(skip)):
            if bool(skip.item()):
                return False
            skip = None
        rows.skip = None if skip is None else skip.detach().to(torch.float32)
        return True

    def launch(self, inputs: Sequence[Number | None]) -> None:
        """Run the kernel with ``inputs`` for the grad steps; ``is_current`` has just held.

        None among them is a number that is in the table already.
        """
        for position, value in enumerate(inputs):
            name = f"input.grad_step.{position}"
            if name in self.kernel.inputs and value is not None:
                self.rows.put_input(self.kernel.inputs.index(name), value)
        if self.current_grads is not self.own_grads:  # else locating them has done it
            torch.autograd.graph.increment_version(self._params)
        if self.late is not None:
            self.late.late.begin()
        self._begin()
        if self.late is not None:
            self._take_numbers()
            self.late.late.advance(self.late, self._replay)
        self.staging.copy_in()
        begin = self.kernel.total_phases
        if begin:
            self.rows.run(self._function, (0, begin), (0, self.rows.count))
        for run in self._runs or ():
            if self.calls is None:
                self.rows.run(self._function, (begin, self.phases), run)
            else:
                self.calls.run(self._function, run)
        self.staging.copy_out()
        if self.late is None:
            self._take_numbers()
        else:
            self.late.late.end()
        self._watched.write_results(self.rows.totals if self.kernel.totals else ())
        self.current_grads = ()

    def _begin(self) -> None:
        """Have the host do its part of a launch."""
        for number in self.numbers:
            self.rows.numbers[number.position] = number.entries[number.key]
        self.rows.begin()

    def _take_numbers(self) -> None:
        """Give the state the Python numbers that the step leaves in it."""
        for number in self.numbers:
            if number.is_stored:
                value = self.rows.numbers_out[number.position]
                number.entries[number.key] = int(value) if number.is_int else value

    def _replay(self) -> None:
        """Have the host's state go on by a step again."""
        assert self.late is not None
        self._begin()
        self._take_numbers()
        self.late.late.note_replay(self.late)

    def record(self) -> KernelRecord:
        """Return what one launch does."""
        reads = writes = 0
        for kind, member in zip(self.rows.kinds, self.members, strict=False):
            read, write = count_bytes(self.kernel.cases[kind])
            reads += read * member.param.numel()
            writes += write * member.param.numel()
        return KernelRecord(
            self.kernel.name,
            self.source,
            len(self.members),
            reads,
            writes,
            self.was_cached,
            self.members[0].param.device,
        )

    def grad_pointers(self) -> array.array[Any]:
        """Return where the gradients of this launch lie."""
        return self.locator.grad_pointers


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _name(leaf: object) -> str:
    assert isinstance(leaf, (Load, Scalar))
    return leaf.buffer if isinstance(leaf, Load) else leaf.name


def _tensor_of(
    name: str,
    param: torch.Tensor,
    group: dict[str, Any],
    state: dict[str, Any],
    copies: dict[torch.Tensor, torch.Tensor],
) -> torch.Tensor | None:
    if name == "param":
        return param
    if name == "copy":
        return copies[param]
    if name.startswith("state."):
        tensor: torch.Tensor = state[name.removeprefix("state.")]
        return tensor
    if name.startswith(ON_DEVICE):
        return group_tensors(group)[name.removeprefix(ON_DEVICE)]
    return None


def _ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
