"""CUDA C++: the text, its conversions and its arithmetic, run on the host."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mpcompile.codegen import cpp, cuda
from mpcompile.codegen import expr as ir
from mpcompile.codegen.cuda import Cuda, busy_phases, emit_cuda
from mpcompile.codegen.expr import Store
from mpcompile.codegen.schedule import Case, Kernel
from mpcompile.runtime.cases import PlannedCase
from mpcompile.runtime.device_rows import DeviceRows
from tests.codegen.cuda_on_host import HostMachine
from tests.codegen.test_cpp import DTYPES, _same, adamw_like


def _run(
    case: Case, columns: dict[str, list[torch.Tensor]], inputs: dict[str, float]
) -> DeviceRows:
    """Run ``case`` on one row for each entry of the columns."""
    columns = {"param": next(iter(columns.values())), **columns}
    sizes = [tensor.numel() for tensor in columns["param"]]
    zeros = [0] * len(sizes)
    rows = DeviceRows("test", [PlannedCase(case)], sizes, zeros, zeros, HostMachine(), None)
    for name in set(columns) & set(rows.kernel.columns):
        for row, tensor in enumerate(columns[name]):
            rows.pointers[rows.place(row, name)] = tensor.data_ptr()
    for name, value in inputs.items():
        rows.put_input(rows.kernel.inputs.index(name), value)
    rows.run(rows.module, (0, rows.phases), (0, len(sizes)))
    return rows


def _convert(source: torch.Tensor, dest: torch.dtype) -> torch.Tensor:
    names = {dtype: name for name, dtype in DTYPES.items()}
    out = torch.zeros_like(source, dtype=dest)
    value = ir.cast(ir.load("a", names[source.dtype]), names[dest])
    _run(Case((Store("b", value),)), {"a": [source], "b": [out]}, {})
    return out


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_every_16_bit_value_widens_exactly(half: str) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[half])
    assert _same(_convert(values, torch.float32), values.float())


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_rounding_to_16_bits_is_to_nearest_even(half: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[half])
    exact = every.float()
    finite = exact[exact.isfinite()].sort().values
    ties = (finite[1:].double() + finite[:-1].double()).div(2).float()
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519.996, 65520, 1e-45])
    up, down = (torch.nextafter(ties, torch.full_like(ties, e)) for e in (math.inf, -math.inf))
    values = torch.cat([exact, ties, up, down, edges])
    assert _same(_convert(values, DTYPES[half]), values.to(DTYPES[half]))


@pytest.mark.parametrize("size", [0, 1, 255, 4096, 4097, 20000])
def test_sum_and_maximum_over_chunks(size: int) -> None:
    a = torch.randn(size)
    wide = ir.cast(ir.load("a", "f32"), "f64")
    square = ir.reduce("sum", ir.apply("mul", wide, wide, dtype="f64"), "f64")
    top = ir.reduce("max", ir.apply("abs", wide, dtype="f64"), "f64")
    rows = _run(Case(sums=(square, top)), {"a": [a, a[:1]]}, {})  # type: ignore[arg-type]  # sums
    sums = rows.fixed["sums"].view(2, 2)
    assert float(sums[0, 0]) == pytest.approx(a.double().square().sum().item(), rel=1e-12)
    assert float(sums[0, 1]) == (a.abs().max().item() if size else 0.0)
    assert not rows.fixed["arrivals"].any()


def test_maximum_keeps_nan() -> None:
    a = torch.randn(5000)
    a[4321] = torch.nan
    top = ir.reduce("max", ir.cast(ir.load("a", "f32"), "f64"), "f64")
    assert _run(Case(sums=(top,)), {"a": [a]}, {}).fixed["sums"].isnan().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_propagate_nan(name: str) -> None:
    a = torch.tensor([1.0, math.nan, 2.0, math.nan])
    b = torch.tensor([2.0, 1.0, math.nan, math.nan])
    out = torch.zeros(4)
    value = ir.apply(name, ir.load("a", "f32"), ir.load("b", "f32"), dtype="f32")
    _run(Case((Store("c", value),)), {"a": [a], "b": [b], "c": [out]}, {})
    assert _same(out, getattr(torch, f"{name}imum")(a, b))


UNARY = {
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "round": torch.round,
    "trunc": torch.trunc,
    "abs": torch.abs,
    "sign": torch.sign,
    "neg": torch.neg,
}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", UNARY)
def test_function_is_torchs(name: str, dtype: str) -> None:
    a = torch.randn(300, dtype=DTYPES[dtype]).abs() + 0.5
    out = torch.zeros_like(a)
    value = ir.apply(name, ir.load("a", dtype), dtype=dtype)
    _run(Case((Store("b", value),)), {"a": [a], "b": [out]}, {})
    torch.testing.assert_close(out, UNARY[name](a), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("other", ["f32", "bf16", "f64"])
def test_any_alignment_and_mixture_of_dtypes(shift: int, other: str) -> None:
    base, out = torch.randn(1000), torch.full((1000,), 9.0, dtype=DTYPES[other])
    a, b = base[shift:900], out[3 : 903 - shift]
    _run(
        Case((Store("b", ir.cast(ir.load("a", "f32"), other)),)),
        {"a": [a, a[:1], a[:0]], "b": [b, out[950:951], out[:0]]},
        {},
    )
    assert torch.equal(b, a.to(DTYPES[other]))
    assert out[950] == a[0].to(DTYPES[other])
    assert (out[:3] == 9).all()
    assert (out[903 - shift : 950] == 9).all()


def test_offsets_of_chunks_have_64_bits() -> None:
    a, b, far = torch.randn(5000), torch.zeros(5000), 1 << 33
    kernel_case = PlannedCase(Case((Store("b", ir.load("param", "f32")),)))
    rows = DeviceRows("test", [kernel_case], [5000], [0], [0], HostMachine(), None)
    for name, tensor in (("param", a), ("b", b)):
        rows.pointers[rows.place(0, name)] = (tensor.data_ptr() - 4 * far) % (1 << 64)
    for name in ("chunk_begin", "chunk_end"):
        rows.fixed[name] += far
    rows.run(rows.module, (0, 1), (0, 1))
    assert torch.equal(a, b)


def test_literals_are_exact() -> None:
    assert Cuda().literal(0.1, "f64") == "0x1.999999999999ap-4"
    assert Cuda().literal(-2.0, "f32") == "(-0x1.0000000000000p+1f)"
    assert Cuda().literal(math.inf, "f32") == "float_of(0x7f800000u)"
    assert Cuda().literal(-math.inf, "f64") == "(-double_of(0x7ff0000000000000ll))"
    assert Cuda().literal(-0.0, "f32") == "(-0x0.0p+0f)"
    assert Cuda().literal(3, "i64") == "int64_t(3)"


def test_both_targets_spell_the_same_operations() -> None:
    assert cuda.OPS == cpp.OPS


def _cuda_like() -> Kernel:
    """Return the golden kernel with its hyperparameter among the numbers of a row."""
    return replace(adamw_like(), shared=(), numbers=("group.lr",))


def test_source_is_golden(golden: Any) -> None:
    golden("adamw_like.cu", emit_cuda(_cuda_like()))


def test_statements_of_both_targets_are_in_one_order() -> None:
    texts = [cpp.emit_cpp(adamw_like()), emit_cuda(_cuda_like())]
    operations = [
        [line.split("=")[1].split("(")[0] for line in text.splitlines() if "const float x" in line]
        for text in texts
    ]
    assert len(operations[0]) == len(operations[1])


def test_phases_without_work_have_no_kernel() -> None:
    late = Case((Store("b", ir.load("temp", "f32")),), temps=(("temp", 3),))
    kernel = Kernel("test", (late,), ("b", "temp"))
    assert busy_phases(kernel) == {3}
    assert "phase_3" in emit_cuda(kernel)
    assert "phase_0" not in emit_cuda(kernel)
