"""Passes over all gradients on a device: one launch that leaves what it finds where it is read.

Partial sums of all gradients are combined by the block that arrives last, in f64, and the
coefficient of clipping is rounded as ``torch.nn.utils.clip_grad_norm_`` rounds it. The host sees
the norm only as a tensor, and which gradients are not finite as flags of the chunks.
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
from mpcompile.runtime.cases import step_input
from mpcompile.runtime.device_rows import DeviceRows
from mpcompile.runtime.gradient_pass import GradientPass
from mpcompile.runtime.grads import NORM_EPSILON
from mpcompile.runtime.machines import Module
from mpcompile.runtime.overflows import NotFinite
from mpcompile.runtime.record import KernelRecord

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Number, Prepared

BOUND = "input.bound"


@dataclass(frozen=True)
class _PassKernel:
    """``partials`` are the sums of each chunk; ``check`` those that tell what is not finite."""

    module: Module
    kinds: torch.Tensor
    partials: torch.Tensor
    check: torch.Tensor
    arrivals: torch.Tensor
    record: KernelRecord


def run_on_device(
    prepared: Prepared,
    rows: DeviceRows,
    grads: Sequence[torch.Tensor],
    wanted: GradientPass,
    numbers: Sequence[Number | None],
    bound: float = math.inf,
) -> tuple[torch.Tensor | None, NotFinite | None]:
    """Return the norm of the gradients, and which of them are not finite, as far as ``wanted``.

    With a norm, the coefficient that limits it to ``bound`` becomes the next number of the launch.
    """
    kernel = prepared.norm_tables.get(wanted)
    if kernel is None:
        kernel = prepared.norm_tables[wanted] = _build(prepared, rows, grads, wanted)
    for position, number in enumerate(numbers):
        if number is not None:
            rows.put_input(rows.kernel.inputs.index(step_input(position)), number)
    others = {
        "kinds": kernel.kinds.data_ptr(),
        "partials": kernel.partials.data_ptr(),
        "arrivals": kernel.arrivals.data_ptr(),
    }
    norm = None
    if wanted.order is not None:
        position = rows.kernel.inputs.index(step_input(len(numbers)))
        rows.forget_input(position)
        rows.put_input(_bound_position(rows.kernel, position), bound)
        norm = torch.empty((), dtype=_norm_dtype(prepared), device=grads[0].device)
        others["norm"] = norm.data_ptr()
    rows.machine.keep_for_stream([kernel.kinds, kernel.partials, kernel.arrivals])
    arguments = rows.arguments(others)
    kernel.module.launch(entry(0), len(rows.chunks.row), [*arguments, 0])
    if not wanted.checks:
        return norm, None
    return norm, NotFinite(~kernel.check.isfinite(), rows.fixed["chunk_row"])


def _norm_dtype(prepared: Prepared) -> torch.dtype:
    return prepared.members[0].param.dtype


def _bound_position(kernel: Kernel, position: int) -> int:
    return len(kernel.inputs) + position


def _build(
    prepared: Prepared, rows: DeviceRows, grads: Sequence[torch.Tensor], wanted: GradientPass
) -> _PassKernel:
    """Return the kernel for gradients of these dtypes; it reads the table of the update."""
    dtypes = sorted({DTYPE_NAMES[grad.dtype] for grad in grads})
    bounds = tuple(f"{BOUND}.{k}" for k in range(len(rows.kernel.inputs)))
    inputs = (*rows.kernel.inputs, *bounds)
    cases = tuple(_with_order(case, wanted.order) for case in wanted.cases(dtypes))
    kernel = Kernel(wanted.name, cases, rows.kernel.columns, rows.kernel.numbers, inputs=inputs)
    total = Total(())
    if wanted.order is not None:
        number = step_input(len(wanted.steps))
        bound = bounds[rows.kernel.inputs.index(number)]
        total = _total(wanted.order, DTYPE_NAMES[_norm_dtype(prepared)], number, bound)
    device, num_chunks = rows.machine.device, len(rows.chunks.row)
    kinds = [dtypes.index(DTYPE_NAMES[grad.dtype]) for grad in grads]
    source = emit_cuda(kernel, total)
    module = rows.machine.load(source, prepared.cache_dir)
    num_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
    partials = torch.zeros(num_chunks, len(cases[0].sums), dtype=torch.float64, device=device)
    made = _PassKernel(
        module,
        rows.to_device(array.array("q", kinds)),
        partials,
        partials[:, wanted.check_sum(dtypes)],
        torch.zeros(1, dtype=torch.int32, device=device),
        KernelRecord(kernel.name, source, len(kinds), num_bytes, 0, module.cached, device),
    )
    rows.kept.append(made)
    return made


def _with_order(case: Case, order: float | None) -> Case:
    leaves = {scalar("input.order", "f64"): constant(order or 0.0, "f64")}
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
