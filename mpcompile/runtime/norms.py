"""The norm of all gradients in one pass, from partial sums in f64 that cannot overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import emit_cpp, measure
from mpcompile.codegen.values import DTYPE_NAMES
from mpcompile.runtime.cases import build_kernel, norm_case, step_input
from mpcompile.runtime.grads import root
from mpcompile.runtime.table import Rows

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Prepared


@dataclass(frozen=True)
class _NormTable:
    rows: Rows
    function: Any


class NormKernels:
    """Kernels and tables for norms; a kernel does not depend on the optimizer."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._cache_dir = cache_dir

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
        rows.pointers[:] = prepared.grad_pointers()
        rows.run(table.function, (0, 1), (0, rows.count))
        sums = rows.sums[0 : rows.count * rows.widths.sums : rows.widths.sums]
        total = (
            max(sums, key=lambda x: (math.isnan(x), x)) if order == math.inf else math.fsum(sums)
        )
        return root(total, order)

    def _table(
        self,
        prepared: Prepared,
        grads: Sequence[torch.Tensor],
        steps: Sequence[str],
        order: float,
    ) -> _NormTable:
        dtypes = sorted({DTYPE_NAMES[grad.dtype] for grad in grads})
        kernel = build_kernel("gradient norm", [norm_case(d, steps, order) for d in dtypes])
        kernel = type(kernel)(kernel.name, kernel.cases, ("grad",), (), (), kernel.inputs)
        library = build_library(emit_cpp(kernel), self._cache_dir).library
        kinds = [dtypes.index(DTYPE_NAMES[grad.dtype]) for grad in grads]
        sizes = [grad.numel() for grad in grads]
        rows = Rows(kernel, measure(kernel), sizes, kinds, [0] * len(sizes), prepared.rows.chunks)
        return _NormTable(rows, library.run)
