"""What Python computes from hyperparameters after a trace."""

from __future__ import annotations

import pytest

from mpcompile.codegen.expr import Expr, apply, cast, constant, load, reduce, scalar
from mpcompile.errors import CodegenError
from mpcompile.runtime.guards import Guard, check_on_host, evaluate, guards_hold

STEPS = scalar("g0:group.steps", "i64")


def _sum(a: Expr, b: Expr) -> Expr:
    return apply("add", a, b, dtype=a.dtype)


def test_expression_of_numbers_is_what_python_computes() -> None:
    rate = apply("div", constant(1.0, "f64"), cast(STEPS, "f64"), dtype="f64")
    smallest = apply("min", rate, constant(0.3, "f64"), dtype="f64")
    assert evaluate(smallest, {"g0:group.steps": 8}) == 0.125
    assert evaluate(smallest, {"g0:group.steps": 2}) == 0.3
    total = apply("fma", rate, rate, scalar("total.0", "f64"), dtype="f64")
    assert evaluate(total, {"g0:group.steps": 2, "total.0": 1.0}) == 1.25


def test_guard_holds_while_its_condition_has_its_value() -> None:
    steps = scalar("group.steps", "i64")
    guard = Guard(apply("gt", steps, constant(5, "i64"), dtype="bool"), True)
    assert guards_hold([guard], {"group.steps": 6})
    assert not guards_hold([guard], {"group.steps": 5})


def test_numbers_of_groups_and_totals_are_computed_on_the_host() -> None:
    check_on_host([("g0:group.steps", _sum(STEPS, constant(1, "i64")))])
    check_on_host([("g0:group.norm", scalar("total.0", "f64"))])


@pytest.mark.parametrize(
    "value",
    [
        scalar("0:state.step", "i64"),
        reduce("sum", load("1:grad", "f64"), "f64"),
        apply("sin", cast(STEPS, "f64"), dtype="f64"),
    ],
)
def test_other_new_numbers_of_groups_are_refused(value: Expr) -> None:
    with pytest.raises(CodegenError, match=r"changes 'k' of its group to what the host"):
        check_on_host([("g0:group.k", value)])
