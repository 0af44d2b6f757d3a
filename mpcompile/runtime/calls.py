"""Run the ATen calls that stand between two phases of a kernel (a matrix product, a row mean)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.codegen.values import DTYPE_NAMES, Value
from mpcompile.errors import CodegenError
from mpcompile.runtime.cases import PlannedCall, PlannedCase, flat_arguments
from mpcompile.runtime.device_rows import DeviceRows

if TYPE_CHECKING:
    from mpcompile.runtime.prepared import Prepared

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def _numbers_of_device(plan: PlannedCase, prepared: Prepared) -> frozenset[str]:
    """Return the arguments that a device computes, and the host does not know.

    Raises:
        CodegenError: one of them has to be a Python number.
    """
    if prepared.machine is None:
        return frozenset()
    stored = {store.buffer for store in plan.case.stores}
    for call in plan.calls:
        flat = flat_arguments(call.call)
        for position, name in call.numbers:
            arg = flat[position]
            if name in stored and isinstance(arg, Value) and arg.shape != ():
                raise CodegenError(
                    f"fuse-updates: {call.call.target} takes a number that the device computes, "
                    "for which the host would have to wait."
                )
    return frozenset(stored)


class CallRunner:
    """The calls of the rows of one table; buffers live for one launch."""

    def __init__(self, prepared: Prepared, planned: Sequence[PlannedCase]) -> None:
        self._prepared, self._planned = prepared, planned
        self._on_device = [_numbers_of_device(plan, prepared) for plan in planned]
        last = max((c.phase + 2 for p in planned for c in p.calls), default=0)
        self.phases = max(prepared.phases, last)

    def run(self, function: Any, run: tuple[int, int]) -> None:
        """Run all phases for the rows [begin, end) of ``run``."""
        prepared = self._prepared
        buffers = [self._allocate(row) for row in range(*run)]
        for phase in range(self.phases):
            if phase < prepared.phases:
                prepared.rows.run(function, (phase, phase + 1), run)
            for row, mine in zip(range(*run), buffers, strict=True):
                for call in self._planned[row].calls:
                    if call.phase == phase:
                        self._call(row, call, mine)
        for row, mine in zip(range(*run), buffers, strict=True):
            for target, source in self._planned[row].copies:
                mine[target].copy_(mine[source])

    def _allocate(self, row: int) -> dict[str, torch.Tensor]:
        """Return the tensors that the calls of ``row`` name; make those the kernel fills."""
        prepared, plan = self._prepared, self._planned[row]
        param, like = prepared.members[row].param, prepared.layouts[row]
        state = prepared._optimizer.state.get(param, {})
        mine = {"param": param.detach(), "grad": prepared.current_grads[row]}
        mine |= {f"state.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
        for name, dtype in plan.buffers:
            mine[name] = torch.empty_strided(
                like.shape, like.stride(), dtype=_DTYPES[dtype], device=like.device
            )
            self._point(row, name, mine[name])
        return mine

    def _point(self, row: int, name: str, tensor: torch.Tensor) -> None:
        if name in self._prepared.kernel.columns:
            self._prepared.rows.pointers[self._prepared.rows.place(row, name)] = tensor.data_ptr()

    def _call(self, row: int, planned: PlannedCall, mine: dict[str, torch.Tensor]) -> None:
        """Run one call; keep its result in the order in which the kernel reads it."""
        call, rows = planned.call, self._prepared.rows
        buffers, numbers = dict(planned.buffers), dict(planned.numbers)
        width = len(self._prepared.kernel.numbers)
        written = self._on_device[row]
        position = -1

        def argument(arg: Any) -> Any:
            nonlocal position
            if isinstance(arg, (list, tuple)):
                return [argument(item) for item in arg]
            position += 1
            if not isinstance(arg, Value):
                return arg
            if position in buffers:
                return mine[buffers[position]]
            column = self._prepared.kernel.numbers.index(numbers[position])
            if numbers[position] in written:
                assert isinstance(rows, DeviceRows)
                return rows.number_tensor(row, column).to(_DTYPES[arg.expr.dtype])
            value = rows.numbers_out[row * width + column]
            if arg.shape == ():
                return torch.tensor(value, dtype=_DTYPES[arg.expr.dtype])
            return int(value) if arg.expr.dtype == "i64" else value

        args = [argument(arg) for arg in call.args]
        kwargs = {name: argument(arg) for name, arg in call.kwargs}
        with torch.no_grad():
            result = call.target(*args, **kwargs)
        like = self._prepared.layouts[row]
        if result.shape == like.shape and result.stride() != like.stride():
            result = torch.empty_strided(
                like.shape, like.stride(), dtype=result.dtype, device=like.device
            ).copy_(result)
        mine[call.result] = result
        self._point(row, call.result, result)
