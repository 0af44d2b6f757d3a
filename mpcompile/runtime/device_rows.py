"""The tensor table of an update on a device: the same rows, mirrored in device memory.

Pointers and numbers of the host go up in one asynchronous copy, and only if they changed. Nothing
here waits: copies come from page-locked memory that is given back to torch, which reuses it when
the copy is done.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import emit_cpp, measure
from mpcompile.codegen.cuda import busy_phases, emit_cuda, entry
from mpcompile.codegen.cuda_frame import FIELDS
from mpcompile.codegen.schedule import Case, Kernel
from mpcompile.runtime.cases import PlannedCase, build_kernel
from mpcompile.runtime.host_part import keeps_state
from mpcompile.runtime.machines import Machine
from mpcompile.runtime.table import Chunks, Rows, build_chunks

MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 16
BLOCKS_WANTED = 1 << 14
"""Chunks grow with the tensors until there are this many; more would be idle work."""
_captured: list[tuple[DeviceRows, torch.Tensor, torch.Tensor]] = []
"""Tables that CUDA graphs read; nobody tells when a graph is gone."""


def device_chunks(sizes: Sequence[int]) -> Chunks:
    """Cut tensors of ``sizes`` elements into chunks; one without elements has an empty chunk."""
    chunk = MIN_CHUNK
    while chunk < MAX_CHUNK and sum(sizes) > chunk * BLOCKS_WANTED:
        chunk *= 2
    first, row, begin, end = (array.array("q") for _ in range(4))
    for index, size in enumerate(sizes):
        first.append(len(row))
        for start in range(0, max(size, 1), chunk):
            row.append(index)
            begin.append(start)
            end.append(min(start + chunk, size))
    first.append(len(row))
    return Chunks(first, row, begin, end)


class DeviceRows(Rows):
    """The arrays of one kernel on a device, and what the host computes for them.

    ``kept`` is what else a launch reads, for as long as these rows live.
    """

    def __init__(
        self,
        name: str,
        cases: Sequence[PlannedCase],
        sizes: Sequence[int],
        kinds: Sequence[int],
        groups: Sequence[int],
        machine: Machine,
        cache_dir: Path | None,
    ) -> None:
        kernel = build_kernel(name, [*(c.case for c in cases), *(c.host for c in cases)])
        on_device = _with_cases(kernel, [case.case for case in cases])
        widths = measure(on_device)
        super().__init__(kernel, widths, sizes, kinds, groups, device_chunks(sizes))
        self.machine, self.phases = machine, widths.phases
        self._busy = busy_phases(on_device)
        self.source = emit_cuda(_without_shared(on_device))
        self.module = machine.load(self.source, cache_dir)
        keeping = [c for c in cases if keeps_state(c.host) and not c.late]
        self.takes_skip = not keeping and not any(c.calls or c.copies for c in cases)
        self.skip: torch.Tensor | None = None
        hosts = [case.host for case in cases]
        self._host: _HostKernel | None = None
        if any(host.stores for host in hosts):
            self._host = _HostKernel(self, _with_cases(kernel, hosts), cache_dir)
        self.kept: list[object] = []
        self._allocate(kinds)

    def _allocate(self, kinds: Sequence[int]) -> None:
        """Make the arrays in device memory."""
        arrays, widths = self.chunks, self.widths
        self.fixed = {
            "kinds": self.to_device(array.array("q", kinds)),
            "first_chunk": self.to_device(arrays.first),
            "chunk_row": self.to_device(arrays.row),
            "chunk_begin": self.to_device(arrays.begin),
            "chunk_end": self.to_device(arrays.end),
            "numbers_out": self._doubles(len(self.numbers)),
            "inputs": self._doubles(2 * len(self.inputs)),  # bounds of clipping come second
            "sums": self._doubles(self.count * widths.sums),
            "partials": self._doubles(len(arrays.row) * widths.sums),
            "arrivals": torch.zeros(self.count, dtype=torch.int32, device=self.machine.device),
        }
        self._inputs_sent: dict[int, float] = {}
        pointers, numbers = _view(self.pointers), _view(self.numbers_out)
        self._sources, self._split = (pointers, numbers), 8 * len(pointers)
        self._sent = torch.empty(0, dtype=torch.int64)
        self._moving = torch.empty_like(torch.cat(self._sources), device=self.machine.device)
        self._spares = [
            (torch.empty_like(self._moving), self.machine.staged(torch.cat(self._sources)))
        ]

    def _doubles(self, count: int) -> torch.Tensor:
        return torch.zeros(max(count, 1), dtype=torch.float64, device=self.machine.device)

    def to_device(self, items: array.array[Any]) -> torch.Tensor:
        """Return 64-bit ``items`` in device memory."""
        return self.machine.staged(_view(items)).to(self.machine.device, non_blocking=True)

    def put_input(self, position: int, value: float | torch.Tensor) -> None:
        """Set a number of the launch; a tensor is one of the device."""
        if isinstance(value, torch.Tensor):
            self.fixed["inputs"][position].copy_(value)
            self.forget_input(position)
        elif self._inputs_sent.get(position) != value or self.machine.is_capturing():
            self.fixed["inputs"][position].fill_(value)
            self._inputs_sent[position] = value

    def put_numbers(self, name: str, values: Sequence[float]) -> None:
        """Set a number of each row that the device reads as it is: none that the host computes."""
        columns = self.kernel.numbers
        self.numbers_out[columns.index(name) :: len(columns)] = array.array("d", values)

    def forget_input(self, position: int) -> None:
        """Note that a kernel writes this number of the launch."""
        self._inputs_sent.pop(position, None)

    def begin(self) -> None:
        """Have the host compute its part; hyperparameters and numbers of this launch are set."""
        if self._host is not None:
            self._host.run()

    def run(self, function: Any, phases: tuple[int, int], rows: tuple[int, int]) -> None:
        """Launch phases [a, b) for rows [c, d)."""
        first, end = self.chunks.first[rows[0]], self.chunks.first[rows[1]]
        arguments = self.arguments({})
        for phase in sorted(self._busy.intersection(range(*phases))):
            function.launch(entry(phase), end - first, [*arguments, first])

    def arguments(self, others: dict[str, int]) -> list[int]:
        """Return the addresses of the arrays, ``others`` in the place of some; uploads changes."""
        moving = self._upload()
        addresses = {name: tensor.data_ptr() for name, tensor in self.fixed.items()}
        addresses["pointers"] = moving.data_ptr()
        addresses["numbers"] = moving.data_ptr() + self._split
        addresses["skip"] = 0 if self.skip is None else self.skip.data_ptr()
        self.machine.keep_for_stream([self._moving, *self.fixed.values()])
        return [(addresses | others).get(name, 0) for _, name, _ in FIELDS]

    def _upload(self) -> torch.Tensor:
        """Return the device's pointers and numbers, which are those of the host now.

        A CUDA graph keeps a copy of its own and the memory that it is filled from, so that a replay
        finds what was captured.
        """
        now = torch.cat(self._sources)
        if self.machine.is_capturing():
            return self._capture(now)
        if not torch.equal(now, self._sent):
            self._moving.copy_(self.machine.staged(now), non_blocking=True)
            self._sent = now
        return self._moving

    def _capture(self, now: torch.Tensor) -> torch.Tensor:
        if self._spares:  # made before the capture, in which allocating is delicate
            moving, staged = self._spares.pop()
            staged.copy_(now)
        else:
            moving, staged = torch.empty_like(self._moving), self.machine.staged(now)
        moving.copy_(staged, non_blocking=True)
        _captured.append((self, moving, staged))
        return moving

    def number_tensor(self, row: int, column: int) -> torch.Tensor:
        """Return a number that the kernel wrote, as a 0-dim tensor of the device."""
        return self.fixed["numbers_out"][row * len(self.kernel.numbers) + column]


class _HostKernel:
    """The host's part of a launch: C++ over the rows of the table, without elements."""

    def __init__(self, rows: DeviceRows, kernel: Kernel, cache_dir: Path | None) -> None:
        self._function = build_library(emit_cpp(kernel), cache_dir).library.run
        sizes = [0] * rows.count
        self._rows = Rows(
            kernel, measure(kernel), sizes, rows.kinds[:-1], rows.groups[:-1], build_chunks(sizes)
        )
        for name in ("pointers", "numbers", "numbers_out", "shared", "inputs"):
            setattr(self._rows.c_table, name, getattr(rows.c_table, name))

    def run(self) -> None:
        """Write the host's state and what the device reads."""
        self._rows.run(self._function, (0, 1), (0, self._rows.count))


def _view(items: array.array[Any]) -> torch.Tensor:
    """Return the memory of ``items``, which must not grow, as 64-bit integers."""
    address, count = items.buffer_info()
    memory = (ctypes.c_int64 * count).from_address(address)
    view = torch.frombuffer(memory, dtype=torch.int64)
    view.source = items  # type: ignore[attr-defined]  # keeps the memory
    return view


def _with_cases(kernel: Kernel, cases: Sequence[Case]) -> Kernel:
    return Kernel(
        kernel.name, tuple(cases), kernel.columns, kernel.numbers, kernel.shared, kernel.inputs
    )


def _without_shared(kernel: Kernel) -> Kernel:
    return Kernel(kernel.name, kernel.cases, kernel.columns, kernel.numbers, (), kernel.inputs)
