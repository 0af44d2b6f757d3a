"""C++: the text, its conversions and its arithmetic."""

from __future__ import annotations

import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile.codegen import expr as ir
from mpcompile.codegen.build import build_library
from mpcompile.codegen.cpp import Cpp, emit_cpp, measure
from mpcompile.codegen.expr import Store
from mpcompile.codegen.host_compiler import find_host_compiler
from mpcompile.codegen.schedule import Case, Kernel
from mpcompile.runtime.table import Rows, build_chunks

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}


def _run(case: Case, columns: dict[str, list[torch.Tensor]], inputs: dict[str, float]) -> Rows:
    """Build and run ``case`` on one row for each entry of the columns."""
    kernel = Kernel("test", (case,), tuple(columns), inputs=tuple(inputs))
    library = build_library(emit_cpp(kernel)).library
    sizes = [tensor.numel() for tensor in next(iter(columns.values()))]
    zeros = [0] * len(sizes)
    rows = Rows(kernel, measure(kernel), sizes, zeros, zeros, build_chunks(sizes))
    for name, tensors in columns.items():
        for row, tensor in enumerate(tensors):
            rows.pointers[rows.place(row, name)] = tensor.data_ptr()
    rows.inputs[: len(inputs)] = type(rows.inputs)("d", inputs.values())
    rows.run(library.run, (0, measure(kernel).phases), (0, len(sizes)))
    return rows


def _convert(source: torch.Tensor, dest: torch.dtype) -> torch.Tensor:
    names = {dtype: name for name, dtype in DTYPES.items()}
    out = torch.zeros_like(source, dtype=dest)
    value = ir.cast(ir.load("a", names[source.dtype]), names[dest])
    _run(Case((Store("b", value),)), {"a": [source], "b": [out]}, {})
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return bool(equal.all())


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
    patterns = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64)
    anything = patterns.to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519.996, 65520, 1e-45])
    up, down = (torch.nextafter(ties, torch.full_like(ties, e)) for e in (math.inf, -math.inf))
    values = torch.cat([exact, ties, up, down, anything, edges])
    assert _same(_convert(values, DTYPES[half]), values.to(DTYPES[half]))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 16384, 40000])
def test_sum_and_maximum_over_chunks(size: int) -> None:
    a = torch.randn(size)
    wide = ir.cast(ir.load("a", "f32"), "f64")
    square = ir.reduce("sum", ir.apply("mul", wide, wide, dtype="f64"), "f64")
    top = ir.reduce("max", ir.apply("abs", wide, dtype="f64"), "f64")
    rows = _run(Case(sums=(square, top)), {"a": [a]}, {})  # type: ignore[arg-type]  # reductions
    assert rows.sums[0] == pytest.approx(a.double().square().sum().item(), rel=1e-12)
    assert rows.sums[1] == (a.abs().max().item() if size else 0.0)


def test_maximum_keeps_nan() -> None:
    a = torch.tensor([1.0, math.nan, 3.0])
    top = ir.reduce("max", ir.cast(ir.load("a", "f32"), "f64"), "f64")
    assert math.isnan(_run(Case(sums=(top,)), {"a": [a]}, {}).sums[0])  # type: ignore[arg-type]


def test_division_by_a_uniform_value_is_correctly_rounded() -> None:
    a = torch.randn(100_000) * torch.randn(100_000).mul(20).exp2()
    a[:5] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    for divisor in (3.0, 0.1, 1e-20, 7e12, math.inf, 0.0):
        out = torch.zeros_like(a)
        c = ir.cast(ir.scalar("c", "f64"), "f32")
        case = Case((Store("b", ir.apply("div", ir.load("a", "f32"), c, dtype="f32")),))
        _run(case, {"a": [a], "b": [out]}, {"c": divisor})
        expected = a / torch.tensor(divisor)
        is_normal = expected.abs() > 1.2e-38
        assert _same(out[is_normal], expected[is_normal])
        assert _same(out[expected.isnan()], expected[expected.isnan()])


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_propagate_nan(name: str) -> None:
    a = torch.tensor([1.0, math.nan, 2.0, math.nan])
    b = torch.tensor([2.0, 1.0, math.nan, math.nan])
    out = torch.zeros(4)
    value = ir.apply(name, ir.load("a", "f32"), ir.load("b", "f32"), dtype="f32")
    _run(Case((Store("c", value),)), {"a": [a], "b": [b], "c": [out]}, {})
    assert _same(out, getattr(torch, f"{name}imum")(a, b))


def test_literals_are_exact() -> None:
    assert Cpp().literal(0.1, "f64") == "0x1.999999999999ap-4"
    assert Cpp().literal(-2.0, "f32") == "(-0x1.0000000000000p+1f)"
    assert Cpp().literal(math.inf, "f32") == "__builtin_inff()"
    assert Cpp().literal(-math.inf, "f64") == "(-__builtin_inf())"
    assert Cpp().literal(3, "i64") == "int64_t(3)"


def adamw_like() -> Kernel:
    """Return a small kernel with everything: a norm, uniform values, a 16-bit copy."""
    g = ir.cast(ir.load("grad", "bf16"), "f32")
    g = ir.apply("mul", g, ir.cast(ir.scalar("input.factor", "f64"), "f32"), dtype="f32")
    p, wide = ir.load("param", "f32"), ir.cast(ir.load("param", "f32"), "f64")
    norm = ir.reduce("sum", ir.apply("mul", wide, wide, dtype="f64"), "f64")
    rate = ir.apply("mul", ir.scalar("group.lr", "f64"), norm, dtype="f64")
    new = ir.apply("sub", p, ir.apply("mul", g, ir.cast(rate, "f32"), dtype="f32"), dtype="f32")
    step = ir.apply("add", ir.scalar("step", "f32"), ir.constant(1.0, "f32"), dtype="f32")
    stores = (Store("param", new), Store("copy", ir.cast(new, "bf16")), Store("step", step))
    columns = ("param", "grad", "copy", "step")
    return Kernel("golden", (Case(stores),), columns, (), ("group.lr",), ("input.factor",))


def test_source_is_golden(golden: Any) -> None:
    golden("adamw_like.cpp", emit_cpp(adamw_like()))


def test_source_does_not_depend_on_the_number_of_tensors() -> None:
    a = [torch.ones(3) for _ in range(50)]
    source = emit_cpp(adamw_like())
    _run(Case((Store("a", ir.load("a", "f32")),)), {"a": a}, {})
    assert emit_cpp(adamw_like()) == source


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
def test_element_loops_are_vectorised(tmp_path: Path) -> None:
    compiler, source = find_host_compiler(), tmp_path / "kernel.cpp"
    source.write_text(emit_cpp(adamw_like()))
    flags = [flag for flag in compiler.flags if flag != "-shared"]
    command = [compiler.path, *flags, "-S", str(source), "-o", str(tmp_path / "kernel.s")]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "kernel.s").read_text()
    assert "mulps" in text, "no packed multiplication of floats"
    assert "subps" in text, "no packed subtraction of floats"
