"""The expression IR: identity, substitution, phases."""

from __future__ import annotations

from mpcompile.codegen import expr as ir


def _mul(a: ir.Expr, b: ir.Expr) -> ir.Expr:
    return ir.apply("mul", a, b, dtype=a.dtype)


def test_equal_expressions_are_one_object() -> None:
    a, b = ir.load("p", "f32"), ir.scalar("lr", "f32")
    assert _mul(a, b) is _mul(ir.load("p", "f32"), ir.scalar("lr", "f32"))
    assert _mul(a, b) is not _mul(b, a)


def test_constants_differ_by_bits_and_dtype() -> None:
    assert ir.constant(0.0, "f32") is not ir.constant(-0.0, "f32")
    assert ir.constant(1.0, "f32") is not ir.constant(1.0, "f64")
    assert ir.constant(float("nan"), "f32") is ir.constant(float("nan"), "f32")


def test_cast_to_the_same_dtype_is_nothing() -> None:
    p = ir.load("p", "f32")
    assert ir.cast(p, "f32") is p
    assert str(ir.cast(p, "bf16")) == "bf16(p[i])"


def test_substitute_rebuilds_what_is_above_a_leaf() -> None:
    p, g = ir.load("p", "f32"), ir.load("g", "f32")
    total = ir.reduce("sum", _mul(p, p), "f32")
    (out,) = ir.substitute([_mul(g, total)], {p: g})
    assert str(out) == "mul(g[i], sum_i(mul(g[i], g[i])))"


def test_reduction_is_uniform_and_known_one_phase_later() -> None:
    p = ir.load("p", "f32")
    norm = ir.reduce("sum", _mul(p, p), "f32")
    scaled = _mul(p, norm)
    second = ir.reduce("sum", scaled, "f32")
    assert norm in ir.uniform_set([scaled])
    assert scaled not in ir.uniform_set([scaled])
    level = ir.levels([second])
    assert (level[p], level[norm], level[scaled], level[second]) == (0, 1, 1, 2)


def test_shared_subtree_is_visited_once() -> None:
    value = ir.load("p", "f32")
    for _ in range(60):
        value = _mul(value, value)
    assert sum(1 for _ in ir.postorder([value])) == 61
