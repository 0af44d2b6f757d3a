"""The norm of all gradients in one pass, from partial sums in f64 that cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import emit_cpp, measure
from mpcompile.codegen.schedule import Term
from mpcompile.codegen.values import DTYPE_NAMES
from mpcompile.runtime.cases import OWN_FACTOR, build_kernel, norm_case, step_input
from mpcompile.runtime.device_norms import clip_on_device
from mpcompile.runtime.device_rows import DeviceRows
from mpcompile.runtime.grads import ClipNorm, clip_coefficient, root
from mpcompile.runtime.record import KernelRecord
from mpcompile.runtime.table import Rows

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Number, Prepared


@dataclass(frozen=True)
class _NormTable:
    rows: Rows
    function: Any
    record: KernelRecord


class NormKernels:
    """Kernels and tables for norms; a kernel does not depend on the optimizer."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._cache_dir = cache_dir

    def clip(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        numbers: Sequence[Number | None],
        clip: ClipNorm,
    ) -> tuple[float | None, torch.Tensor]:
        """Return what ``clip`` multiplies the gradients by after ``steps``, and their norm."""
        if isinstance(prepared.rows, DeviceRows):
            return None, clip_on_device(prepared, prepared.rows, grads, steps, numbers, clip)
        known = [0.0 if number is None else float(number) for number in numbers]
        total = self.norm(prepared, grads, steps, known, float(clip.norm_type))
        norm = torch.tensor(total, dtype=prepared.members[0].param.dtype)
        return clip_coefficient(norm, clip.max_norm), norm

    def norm(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        numbers: Sequence[float],
        order: float,
    ) -> float:
        """Return the norm of the gradients of ``prepared`` after ``steps`` with ``numbers``."""
        key = (tuple(steps), order)
        table = prepared.norm_tables.get(key)
        if table is None:
            table = prepared.norm_tables[key] = self._table(prepared, grads, steps, order)
        rows = table.rows
        for position, value in enumerate((*numbers, order)):
            name = "input.order" if position == len(numbers) else step_input(position)
            if name in rows.kernel.inputs:
                rows.inputs[rows.kernel.inputs.index(name)] = value
        if prepared.own_factors:
            rows.put_numbers(OWN_FACTOR, prepared.own_factors)
        rows.pointers[:] = prepared.grad_pointers()
        rows.run(table.function, (0, 1), (0, rows.count))
        return root(rows.totals[0], order)

    def records(self, prepared: Prepared) -> list[KernelRecord]:
        """Return what the norms that were taken for ``prepared`` do."""
        return [table.record for table in prepared.norm_tables.values()]

    def _table(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        order: float,
    ) -> _NormTable:
        name = "gradient norm" if order == 2 else f"gradient norm of order {order:g}"
        dtypes = sorted({DTYPE_NAMES[grad.dtype] for grad in grads})
        cases = [norm_case(d, steps, order) for d in dtypes]
        cases = [replace(case, sums=(), terms=(Term(0, case.sums[0], 0),)) for case in cases]
        kernel = build_kernel(name, cases, ["max" if order == math.inf else "sum"])
        kernel = replace(kernel, columns=("grad",))
        source = emit_cpp(kernel)
        built = build_library(source, self._cache_dir)
        kinds = [dtypes.index(DTYPE_NAMES[grad.dtype]) for grad in grads]
        sizes = [grad.numel() for grad in grads]
        rows = Rows(kernel, measure(kernel), sizes, kinds, [0] * len(sizes), prepared.rows.chunks)
        num_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
        record = KernelRecord(kernel.name, source, len(sizes), num_bytes, 0, built.cached)
        return _NormTable(rows, built.library.run, record)
