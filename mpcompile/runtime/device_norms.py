"""Clipping by norm on a device: one launch that leaves the coefficient where the update reads it.

Partial sums of all gradients are combined by the block that arrives last, in f64, and the
coefficient is rounded as ``torch.nn.utils.clip_grad_norm_`` rounds it. The host sees the norm only
as a tensor.
"""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpcompile.codegen.cuda import TOTAL, Total, emit_cuda, entry
from mpcompile.codegen.expr import Expr, Reduce, Store, apply, cast, constant, scalar, substitute
from mpcompile.codegen.schedule import Case, Kernel
from mpcompile.codegen.values import DTYPE_NAMES, compute_dtype
from mpcompile.runtime.cases import norm_case, step_input
from mpcompile.runtime.device_rows import DeviceRows
from mpcompile.runtime.grads import NORM_EPSILON, ClipNorm
from mpcompile.runtime.machines import Module
from mpcompile.runtime.record import KernelRecord

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Number, Prepared

BOUND = "input.bound"


@dataclass(frozen=True)
class _NormKernel:
    module: Module
    kinds: torch.Tensor
    partials: torch.Tensor
    arrivals: torch.Tensor
    record: KernelRecord


def clip_on_device(
    prepared: Prepared,
    rows: DeviceRows,
    grads: Sequence[torch.Tensor],
    steps: Sequence[str],
    numbers: Sequence[Number | None],
    clip: ClipNorm,
) -> torch.Tensor:
    """Return the norm of the gradients after ``steps``; the coefficient becomes the next number."""
    order = float(clip.norm_type)
    key = (tuple(steps), order)
    kernel = prepared.norm_tables.get(key)
    if kernel is None:
        kernel = prepared.norm_tables[key] = _build(prepared, rows, grads, steps, order)
    for position, number in enumerate(numbers):
        if number is not None:
            rows.put_input(rows.kernel.inputs.index(step_input(position)), number)
    position = rows.kernel.inputs.index(step_input(len(numbers)))
    rows.forget_input(position)
    rows.put_input(_bound_position(rows.kernel, position), clip.max_norm)
    norm = torch.empty((), dtype=_norm_dtype(prepared), device=grads[0].device)
    others = {
        "kinds": kernel.kinds.data_ptr(),
        "partials": kernel.partials.data_ptr(),
        "arrivals": kernel.arrivals.data_ptr(),
        "norm": norm.data_ptr(),
    }
    rows.machine.keep_for_stream([kernel.kinds, kernel.partials, kernel.arrivals])
    arguments = rows.arguments(others)
    kernel.module.launch(entry(0), len(rows.chunks.row), [*arguments, 0])
    return norm


def _norm_dtype(prepared: Prepared) -> torch.dtype:
    return prepared.members[0].param.dtype


def _bound_position(kernel: Kernel, position: int) -> int:
    return len(kernel.inputs) + position


def _build(
    prepared: Prepared,
    rows: DeviceRows,
    grads: Sequence[torch.Tensor],
    steps: Sequence[str],
    order: float,
) -> _NormKernel:
    """Return the kernel for gradients of these dtypes; it reads the table of the update."""
    dtypes = sorted({DTYPE_NAMES[grad.dtype] for grad in grads})
    position = rows.kernel.inputs.index(step_input(len(steps)))
    bounds = tuple(f"{BOUND}.{k}" for k in range(len(rows.kernel.inputs)))
    inputs = (*rows.kernel.inputs, *bounds)
    cases = tuple(_with_order(norm_case(dtype, steps, order), order) for dtype in dtypes)
    kernel = Kernel("gradient norm", cases, rows.kernel.columns, rows.kernel.numbers, inputs=inputs)
    dtype = DTYPE_NAMES[_norm_dtype(prepared)]
    total = _total(order, dtype, step_input(len(steps)), bounds[position])
    device = rows.machine.device
    kinds = [dtypes.index(DTYPE_NAMES[grad.dtype]) for grad in grads]
    source = emit_cuda(kernel, total)
    module = rows.machine.load(source, prepared.cache_dir)
    num_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
    made = _NormKernel(
        module,
        rows.to_device(array.array("q", kinds)),
        torch.zeros(len(rows.chunks.row), dtype=torch.float64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        KernelRecord(kernel.name, source, len(kinds), num_bytes, 0, module.cached, device),
    )
    rows.kept.append(made)
    return made


def _with_order(case: Case, order: float) -> Case:
    leaves = {scalar("input.order", "f64"): constant(order, "f64")}
    sums = [value for value in substitute(case.sums, leaves) if isinstance(value, Reduce)]
    return Case(sums=tuple(sums))


def _total(order: float, dtype: str, number: str, bound: str) -> Total:
    """Return what becomes of the sum: the norm, and the coefficient as torch rounds it."""
    at = compute_dtype(dtype)
    value = scalar(TOTAL, "f64")
    if order == 2.0:
        value = apply("sqrt", value, dtype="f64")
    elif order not in (1.0, math.inf):
        value = apply("pow", value, constant(1.0 / order, "f64"), dtype="f64")
    norm = cast(value, dtype)

    def rounded(op: str, *args: Expr) -> Expr:
        return cast(cast(apply(op, *args, dtype=at), dtype), at)

    shifted = rounded("add", cast(norm, at), cast(constant(NORM_EPSILON, "f64"), at))
    inverse = rounded("div", cast(constant(1.0, "f64"), at), shifted)
    coefficient = rounded("mul", inverse, cast(scalar(bound, "f64"), at))
    limited = apply("min", coefficient, cast(constant(1.0, "f64"), at), dtype=at)
    return Total((Store("norm", norm), Store(number, cast(limited, "f64"))))
