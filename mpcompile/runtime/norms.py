"""Passes over all gradients before an update: their norm in one pass, and what is not finite.

On the host; partial sums are in f64, which cannot overflow. A device has passes of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import emit_cpp, measure
from mpcompile.codegen.schedule import Term
from mpcompile.codegen.values import DTYPE_NAMES
from mpcompile.runtime.cases import OWN_FACTOR, build_kernel, step_input
from mpcompile.runtime.device_norms import run_on_device
from mpcompile.runtime.device_rows import DeviceRows
from mpcompile.runtime.gradient_pass import NORM_SUM, GradientPass
from mpcompile.runtime.grads import ClipNorm, clip_coefficient, root
from mpcompile.runtime.overflows import NotFinite
from mpcompile.runtime.record import KernelRecord
from mpcompile.runtime.table import Rows

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Number, Prepared


@dataclass(frozen=True)
class _PassTable:
    """``check`` is the sum of each row that is not finite if an element is not."""

    rows: Rows
    function: Any
    record: KernelRecord
    check: torch.Tensor


class NormKernels:
    """Kernels and tables of passes; a kernel does not depend on the optimizer."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._cache_dir = cache_dir

    def clip(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        numbers: Sequence[Number | None],
        clip: ClipNorm,
        checks: bool = False,
    ) -> tuple[float | None, torch.Tensor, NotFinite | None]:
        """Return what ``clip`` multiplies the gradients by after ``steps``, and their norm.

        With ``checks`` also which of them are not finite. It is one pass either way.
        """
        wanted = GradientPass(tuple(steps), float(clip.norm_type), checks)
        if isinstance(prepared.rows, DeviceRows):
            bound = clip.max_norm
            norm, found = run_on_device(prepared, prepared.rows, grads, wanted, numbers, bound)
            assert norm is not None, "asked for"
            return None, norm, found
        table = self._run(prepared, grads, wanted, numbers)
        total = root(table.rows.totals[0], float(clip.norm_type))
        norm = torch.tensor(total, dtype=prepared.members[0].param.dtype)
        found = NotFinite(~table.check.isfinite()) if checks else None
        return clip_coefficient(norm, clip.max_norm), norm, found

    def check(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        numbers: Sequence[Number | None],
    ) -> NotFinite:
        """Return which gradients are not finite after ``steps``, where no norm is wanted."""
        wanted = GradientPass(tuple(steps), None, checks=True)
        if isinstance(prepared.rows, DeviceRows):
            _, found = run_on_device(prepared, prepared.rows, grads, wanted, numbers)
            assert found is not None, "asked for"
            return found
        return NotFinite(~self._run(prepared, grads, wanted, numbers).check.isfinite())

    def _run(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        wanted: GradientPass,
        numbers: Sequence[Number | None],
    ) -> _PassTable:
        """Run the pass over the gradients of ``prepared``, and return its table."""
        table = prepared.norm_tables.get(wanted)
        if table is None:
            table = prepared.norm_tables[wanted] = self._table(prepared, grads, wanted)
        rows = table.rows
        named = {step_input(k): n for k, n in enumerate(numbers) if n is not None}
        for name, value in {**named, "input.order": wanted.order or 0.0}.items():
            if name in rows.kernel.inputs:
                rows.put_input(rows.kernel.inputs.index(name), value)
        if prepared.own_factors:
            rows.put_numbers(OWN_FACTOR, prepared.own_factors)
        rows.pointers[:] = prepared.grad_pointers()
        rows.run(table.function, (0, 1), (0, rows.count))
        return table

    def records(self, prepared: Prepared) -> list[KernelRecord]:
        """Return what the passes that were made for ``prepared`` do."""
        return [table.record for table in prepared.norm_tables.values()]

    def _table(
        self, prepared: Prepared, grads: Sequence[torch.Tensor], wanted: GradientPass
    ) -> _PassTable:
        dtypes = sorted({DTYPE_NAMES[grad.dtype] for grad in grads})
        cases, ops = wanted.cases(dtypes), list[str]()
        if wanted.order is not None:
            cases = [replace(c, terms=(Term(0, c.sums[NORM_SUM], 0),)) for c in cases]
            ops.append(wanted.fold)
        kernel = replace(build_kernel(wanted.name, cases, ops), columns=("grad",))
        source = emit_cpp(kernel)
        built = build_library(source, self._cache_dir)
        kinds = [dtypes.index(DTYPE_NAMES[grad.dtype]) for grad in grads]
        sizes = [grad.numel() for grad in grads]
        rows = Rows(kernel, measure(kernel), sizes, kinds, [0] * len(sizes), prepared.rows.chunks)
        num_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
        record = KernelRecord(kernel.name, source, len(sizes), num_bytes, 0, built.cached)
        check = _sums(rows)[:, wanted.check_sum(dtypes)] if wanted.checks else torch.empty(0)
        return _PassTable(rows, built.library.run, record, check)


def _sums(rows: Rows) -> torch.Tensor:
    """Return the memory of the sums of ``rows``, which have to outlive it: (rows, sums)."""
    address, count = rows.sums.buffer_info()
    memory = (ctypes.c_double * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float64).view(rows.count, rows.widths.sums)
