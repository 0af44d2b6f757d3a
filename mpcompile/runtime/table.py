"""The tensor table of one update: where parameters, gradients and state lie, in chunks.

The table is made for a set of parameters with gradients. Each launch asks its native part whether
the objects and layouts still hold and where the data lies now, so ``load_state_dict``, ``p.data =``
and friends are met without a hook and without a recompile.
"""

from __future__ import annotations

import array
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpcompile.codegen.cpp import Sizes
from mpcompile.codegen.schedule import Kernel
from mpcompile.runtime.handles import Handles, Layouts, TensorList, native, open_capsules, readers

CHUNK_ELEMENTS = 16384
ELEMENTS_PER_THREAD = 32768
"""Work that is worth another thread; ATen's grain size."""
MANY_TENSORS = 1000
"""From how many tensors on it pays to read their addresses on several threads."""
FIELDS = (
    "pointers",
    "numbers",
    "numbers_out",
    "shared",
    "inputs",
    "sums",
    "partials",
    "kinds",
    "groups",
    "first_chunk",
    "chunk_row",
    "chunk_begin",
    "chunk_end",
    "terms",
    "totals",
)


class CTable(ctypes.Structure):
    """``Table`` of the emitted source."""

    _fields_ = [(name, ctypes.c_void_p) for name in FIELDS]


def zeros(code: str, count: int) -> array.array[Any]:
    """Return ``count`` zeros of array type ``code``; never empty, so that it has an address."""
    return array.array(code, bytes(8 * max(count, 1)))


def address(buffer: array.array[Any]) -> int:
    """Return where ``buffer`` lies; it must not grow afterwards."""
    return buffer.buffer_info()[0]


@dataclass(frozen=True)
class Chunks:
    """The pieces that threads take: elements [begin, end) of a row, rows in order."""

    first: array.array[Any]
    row: array.array[Any]
    begin: array.array[Any]
    end: array.array[Any]


def build_chunks(sizes: Sequence[int]) -> Chunks:
    """Cut tensors of ``sizes`` elements into chunks."""
    first, row, begin, end = (array.array("q") for _ in range(4))
    for index, size in enumerate(sizes):
        first.append(len(row))
        for start in range(0, size, CHUNK_ELEMENTS):
            row.append(index)
            begin.append(start)
            end.append(min(start + CHUNK_ELEMENTS, size))
    first.append(len(row))
    for piece in (row, begin, end):
        if not piece:
            piece.append(0)
    return Chunks(first, row, begin, end)


class Rows:
    """The arrays that one kernel reads, for ``len(sizes)`` tensors."""

    def __init__(
        self,
        kernel: Kernel,
        widths: Sizes,
        sizes: Sequence[int],
        kinds: Sequence[int],
        groups: Sequence[int],
        chunks: Chunks,
    ) -> None:
        count = len(sizes)
        self.kernel, self.widths, self.count, self.chunks = kernel, widths, count, chunks
        self.max_threads = 1 + sum(sizes) // ELEMENTS_PER_THREAD
        self.pointers = zeros("Q", count * len(kernel.columns))
        self.numbers = zeros("d", count * len(kernel.numbers))
        self.numbers_out = zeros("d", count * len(kernel.numbers))
        self.shared = zeros("d", (max(groups, default=0) + 1) * len(kernel.shared))
        self.inputs = zeros("d", len(kernel.inputs))
        self.sums = zeros("d", count * widths.sums)
        self.partials = zeros("d", len(chunks.row) * widths.sums)
        self.kinds = array.array("q", [*kinds, 0])
        self.groups = array.array("q", [*groups, 0])
        neutral = [0.0 if fold.op == "sum" else -math.inf for fold in kernel.totals]
        self.terms = array.array("d", [*(neutral * count), 0.0])
        self.totals = zeros("d", len(kernel.totals))
        arrays = [getattr(self, name) for name in FIELDS[:9]]
        arrays += [chunks.first, chunks.row, chunks.begin, chunks.end, self.terms, self.totals]
        self.c_table = CTable(*(address(item) for item in arrays))

    def place(self, row: int, column: str) -> int:
        """Return the position of a pointer."""
        return row * len(self.kernel.columns) + self.kernel.columns.index(column)

    def put_input(self, position: int, value: float | torch.Tensor) -> None:
        """Set a number of the launch."""
        self.inputs[position] = float(value)

    def put_numbers(self, name: str, values: Sequence[float]) -> None:
        """Set a number of each row that is no state."""
        columns = self.kernel.numbers
        self.numbers[columns.index(name) :: len(columns)] = array.array("d", values)

    def begin(self) -> None:
        """Do what a launch needs before its first phase; hyperparameters and numbers are set."""

    def run(self, function: Any, phases: tuple[int, int], rows: tuple[int, int]) -> None:
        """Run phases [a, b) for rows [c, d), on as many threads as torch uses."""
        threads = min(torch.get_num_threads(), self.max_threads)
        function(ctypes.byref(self.c_table), *phases, *rows, threads)


class Watch:
    """Notices that Python objects were replaced: lists, dicts of state, entries of these."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._native = native(cache_dir)
        self._lists: list[tuple[list[Any], Any, int]] = []
        self._dicts: list[tuple[dict[Any, Any], Any, int]] = []
        self._entries: tuple[list[Any], Any, Any] | None = None
        self._keep: list[Any] = []

    def watch_list(self, items: list[Any]) -> None:
        """Expect ``items`` to hold the same objects."""
        self._keep.append(list(items))
        self._lists.append((items, _addresses(items), len(items)))

    def watch_dict(self, entries: dict[Any, Any]) -> None:
        """Expect ``entries`` to hold the same objects under the same keys, in the same order."""
        pairs = [item for pair in entries.items() for item in pair]
        self._keep.append(pairs)
        self._dicts.append((entries, _addresses(pairs), len(entries)))

    def watch_entries(self, dicts: list[dict[str, Any]]) -> None:
        """Expect the same of each dict of a list; numbers may change."""
        pairs: list[Any] = []
        for entries in dicts:
            for key, value in entries.items():
                pairs += (key, value)
        self._keep.append(pairs)
        free = [isinstance(item, (int, float)) and not isinstance(item, bool) for item in pairs]
        widths = (ctypes.c_int64 * max(len(dicts), 1))(*map(len, dicts))
        addresses = [0 if skip else id(item) for item, skip in zip(pairs, free, strict=True)]
        items = (ctypes.c_void_p * max(len(pairs), 1))(*addresses)
        self._entries = (dicts, widths, items)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        lib = self._native
        if not all(lib.list_is(*item) for item in self._lists):
            return False
        if not all(lib.dict_is(*item) for item in self._dicts):
            return False
        return self._entries is None or bool(lib.dicts_are(*self._entries))


def _addresses(items: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * max(len(items), 1))(*map(id, items))


@dataclass
class Located:
    """Tensors whose pointers are read again at every launch, and where these go."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, tensor: torch.Tensor, place: int) -> None:
        """Add a tensor and the position of its pointer."""
        self.tensors.append(tensor)
        self.places.append(place)


class Locator:
    """Writes the pointers of fixed tensors and of the gradients of the moment into ``rows``."""

    def __init__(
        self,
        rows: Rows,
        fixed: Located,
        grads: Sequence[torch.Tensor],
        owners: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        cache_dir: Path | None,
    ) -> None:
        """Look at all tensors; ``owners`` are the parameters with a gradient, then the others."""
        self._native, self._readers, self._rows = native(cache_dir), readers(), rows
        handles, layouts = Handles(fixed.tensors), Layouts(fixed.tensors)
        places = array.array("q", [*fixed.places, 0])
        self._fixed = TensorList(len(fixed.tensors), handles, layouts, address(places))
        self._grad_layouts = Layouts(grads)
        self._grad_places = array.array(
            "q", [rows.place(r, "grad") for r in range(rows.count)] + [0]
        )
        holders = Handles([*owners[0], *owners[1]])
        self._owned = TensorList(
            rows.count, holders, self._grad_layouts, address(self._grad_places)
        )
        self._num_without = len(owners[1])
        self._keep = (handles, layouts, places, holders)
        self.grad_pointers = zeros("Q", rows.count)
        self._moved = ctypes.c_int64()

    def locate(self, own_grads: bool = False) -> tuple[bool, bool]:
        """Return whether all layouts hold, and whether a pointer to a fixed tensor changed.

        With ``own_grads`` the ``.grad`` of each owner is located too, and has to be None for those
        without one.
        """
        changed = self._native.locate(
            ctypes.addressof(self._readers),
            ctypes.addressof(self._fixed),
            ctypes.addressof(self._owned) if own_grads else None,
            self._num_without,
            address(self._rows.pointers),
            address(self.grad_pointers),
            ctypes.addressof(self._moved),
            torch.get_num_threads() if self._fixed.count > MANY_TENSORS else 1,
        )
        return changed == 0, self._moved.value > 0

    def locate_grads(self, grads: Sequence[torch.Tensor]) -> bool:
        """Take the pointers of ``grads``; return whether their layouts hold."""
        changed = self._native.locate_once(
            ctypes.addressof(self._readers),
            open_capsules(grads),
            ctypes.addressof(self._grad_layouts.layouts),
            ctypes.addressof(self._grad_layouts.strides),
            address(self._grad_places),
            address(self._rows.pointers),
            address(self.grad_pointers),
        )
        return bool(changed == 0)


def independent_runs(ranges: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Cut the rows into runs [begin, end) within which no two rows write the same memory.

    ``ranges`` lists the written [begin, end) byte ranges of each row. Runs follow one another, so
    tensors that share storage are updated in the order in which eager updates them.
    """
    overlaps = _overlaps(sorted((b, e, r) for r, spans in enumerate(ranges) for b, e in spans))
    runs, begin = [], 0
    for row in range(1, len(ranges)):
        if any(begin <= other < row for other in overlaps.get(row, ())):
            runs.append((begin, row))
            begin = row
    return [*runs, (begin, len(ranges))]


def _overlaps(spans: Sequence[tuple[int, int, int]]) -> dict[int, set[int]]:
    """Return, for each row that shares memory with another, which ones; ``spans`` is sorted."""
    found: dict[int, set[int]] = {}
    still_open: list[tuple[int, int]] = []
    for begin, end, row in spans:
        still_open = [(e, r) for e, r in still_open if e > begin]
        for _, other in still_open:
            if other != row:
                found.setdefault(row, set()).add(other)
                found.setdefault(other, set()).add(row)
        if end > begin:
            still_open.append((end, row))
    return found
