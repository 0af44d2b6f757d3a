"""Phases of a kernel, and divisions that become products."""

from __future__ import annotations

from mpcompile.codegen import expr as ir
from mpcompile.codegen.expr import Store
from mpcompile.codegen.schedule import Case, build_schedule, count_bytes, reduce_divisions

P, G = ir.load("param", "f32"), ir.load("grad", "f32")


def _norm() -> ir.Expr:
    wide = ir.cast(P, "f64")
    total = ir.reduce("sum", ir.apply("mul", wide, wide, dtype="f64"), "f64")
    return ir.cast(ir.apply("sqrt", total, dtype="f64"), "f32")


def test_what_reads_a_norm_comes_a_phase_later() -> None:
    value = ir.apply("mul", G, _norm(), dtype="f32")
    schedule = build_schedule(Case((Store("param", value),)))
    first, second = schedule.phases
    assert [str(r) for r in first.reductions] == ["sum_i(mul(f64(param[i]), f64(param[i])))"]
    assert not first.stores
    assert [s.buffer for s in second.stores] == ["param"]
    assert second.uniforms == [_norm()]


def test_early_store_does_not_wait() -> None:
    late = Store("param", ir.apply("mul", G, _norm(), dtype="f32"))
    early = Store("arg", ir.apply("add", P, G, dtype="f32"))
    schedule = build_schedule(Case((late, early), early=frozenset({"arg"})))
    assert [s.buffer for s in schedule.phases[0].stores] == ["arg"]


def test_result_of_a_call_is_read_after_its_phase() -> None:
    value = ir.apply("add", P, ir.load("temp", "f32"), dtype="f32")
    schedule = build_schedule(Case((Store("param", value),), temps=(("temp", 2),)))
    assert [len(phase.stores) for phase in schedule.phases] == [0, 0, 1]


def test_uniform_store_is_done_once_a_tensor() -> None:
    step = ir.apply("add", ir.scalar("step", "f32"), ir.constant(1.0, "f32"), dtype="f32")
    (phase,) = build_schedule(Case((Store("step", step),))).phases
    assert phase.uniform_stores == [Store("step", step)]
    assert not phase.stores


def test_division_by_a_uniform_value_becomes_a_product() -> None:
    c = ir.scalar("c", "f32")
    value = ir.apply("div", ir.apply("div", P, c, dtype="f32"), G, dtype="f32")
    (store,) = reduce_divisions(Case((Store("param", value),))).stores
    assert str(store.value) == "div(div_by(param[i], c, div(1.0, c)), grad[i])"


def test_bytes_are_those_of_every_pass() -> None:
    half = Store("copy", ir.cast(ir.apply("mul", G, _norm(), dtype="f32"), "bf16"))
    assert count_bytes(Case((half,))) == (8, 2)
