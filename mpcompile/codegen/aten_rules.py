"""What each ATen operation computes for one element, as its CPU kernel does.

A rule gets operands already widened to the dtype ATen computes in (f32 for 16-bit tensors) and
returns the result in it; ``extract`` puts the casts around it. Formulas follow
``aten/src/ATen/native`` (``cpu/PointwiseOpsKernel.cpp``, ``Lerp.h``, ``cpu/PowKernel.cpp``) down to
the order of operations and to where their vectorised loops fuse a product into a sum (``fma``, by
``vec::fmadd`` or by contraction), so that an update rounds as eager does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from mpcompile.codegen.expr import Constant, Expr, apply, cast, constant, select

aten = torch.ops.aten
Rule = Callable[..., Expr]


def _op(name: str) -> Rule:
    return lambda *args: apply(name, *args, dtype=args[0].dtype)


add, sub, mul, div = _op("add"), _op("sub"), _op("mul"), _op("div")
negate, sqrt, fma = _op("neg"), _op("sqrt"), _op("fma")


def compare(name: str) -> Rule:
    """Return the rule of a comparison; its result is a bool."""
    return lambda a, b: apply(name, a, b, dtype="bool")


def _one(like: Expr) -> Expr:
    return constant(1.0, like.dtype)


def reciprocal(x: Expr) -> Expr:
    """1 / x."""
    return div(_one(x), x)


def rsqrt(x: Expr) -> Expr:
    """1 / sqrt(x)."""
    return div(_one(x), sqrt(x))


def power(x: Expr, exponent: Expr) -> Expr:
    """X ** exponent, with the special cases that ATen has for literal exponents."""
    if isinstance(exponent, Constant):
        special: dict[float, Callable[[], Expr]] = {
            0.5: lambda: sqrt(x),
            1.0: lambda: x,
            2.0: lambda: mul(x, x),
            3.0: lambda: mul(mul(x, x), x),
            -0.5: lambda: rsqrt(x),
            -1.0: lambda: reciprocal(x),
            -2.0: lambda: reciprocal(mul(x, x)),
        }
        if exponent.value in special:
            return special[exponent.value]()
    return apply("pow", x, exponent, dtype=x.dtype)


def _is_one(x: Expr) -> bool:
    return isinstance(x, Constant) and x.value == 1


def add_scaled(a: Expr, b: Expr, alpha: Expr) -> Expr:
    """A + alpha * b, rounded once."""
    return add(a, b) if _is_one(alpha) else fma(b, alpha, a)


def sub_scaled(a: Expr, b: Expr, alpha: Expr) -> Expr:
    """A - alpha * b, rounded once."""
    return sub(a, b) if _is_one(alpha) else fma(b, negate(alpha), a)


def lerp(start: Expr, end: Expr, weight: Expr) -> Expr:
    """Start + weight * (end - start), from whichever end is nearer."""
    delta = sub(end, start)
    near = apply("lt", _op("abs")(weight), constant(0.5, weight.dtype), dtype="bool")
    coefficient = select(near, weight, sub(weight, _one(weight)))
    return fma(coefficient, delta, select(near, start, end))


def addcmul(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    """X + value * a * b, the last product and the sum rounded once."""
    return fma(a if _is_one(value) else mul(value, a), b, x)


def addcdiv(x: Expr, a: Expr, b: Expr, value: Expr) -> Expr:
    """X + value * a / b."""
    return add(x, div(a if _is_one(value) else mul(value, a), b))


def clamp(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """Min(max(x, low), high); NaN stays NaN."""
    if low is not None:
        x = _op("max")(x, low)
    return x if high is None else _op("min")(x, high)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN."""
    return _op("sign")(x)


def logical(name: str) -> Rule:
    """Return the rule of an operation on bools."""
    return lambda *args: apply(name, *args, dtype="bool")


def truth(x: Expr) -> Expr:
    """Whether ``x`` is not zero."""
    return x if x.dtype == "bool" else apply("ne", x, constant(0, x.dtype), dtype="bool")


POINTWISE: dict[object, Rule] = {
    aten.add.Tensor: add_scaled,
    aten.add.Scalar: add_scaled,
    aten.sub.Tensor: sub_scaled,
    aten.sub.Scalar: sub_scaled,
    aten.rsub.Scalar: lambda a, b, alpha: sub_scaled(b, a, alpha),
    aten.rsub.Tensor: lambda a, b, alpha: sub_scaled(b, a, alpha),
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    aten.neg.default: negate,
    aten.abs.default: _op("abs"),
    aten.sqrt.default: sqrt,
    aten.rsqrt.default: rsqrt,
    aten.reciprocal.default: reciprocal,
    aten.square.default: lambda x: mul(x, x),
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.exp.default: _op("exp"),
    aten.log.default: _op("log"),
    aten.tanh.default: _op("tanh"),
    aten.floor.default: _op("floor"),
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.pow.Scalar: power,
    aten.maximum.default: _op("max"),
    aten.minimum.default: _op("min"),
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.clamp_min.default: lambda x, low: clamp(x, low, None),
    aten.clamp_max.default: lambda x, high: clamp(x, None, high),
}
"""Operations whose operands all have the dtype they are computed in."""

OPTIONAL: dict[object, dict[str, float]] = {
    **{op: {"alpha": 1} for op in POINTWISE if str(op).split(".")[1] in ("add", "sub", "rsub")},
    aten.addcmul.default: {"value": 1},
    aten.addcdiv.default: {"value": 1},
}
"""Keyword arguments that become trailing operands, and their defaults."""

COMPARISONS: dict[object, str] = {
    getattr(getattr(aten, name), overload): name
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Scalar", "Tensor")
}

SAME_VALUE = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.contiguous.default,
    }
)
"""Operations that return their first operand as it is."""

NUMBERS: dict[object, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.floordiv: "floordiv",
    operator.mod: "mod",
    operator.neg: "neg",
    operator.pos: "pos",
    operator.abs: "abs",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.and_: "and",
    operator.or_: "or",
    torch.sym_max: "max",
    torch.sym_min: "min",
    torch.sym_not: "not",
    torch.sym_float: "float",
    torch.sym_int: "int",
    torch.sym_ite: "where",
    torch._sym_sqrt: "sqrt",  # type: ignore[attr-defined]  # set by a loop in torch
}
"""Arithmetic on Python numbers, by what ``make_fx`` writes for it."""


def number(name: str, args: list[Expr], dtype: str) -> Expr:
    """Return ``name`` of Python numbers; ``dtype`` (f64, i64, bool) is that of the result."""
    if name in ("float", "pos"):
        return cast(args[0], dtype)
    if name == "int":
        return cast(apply("trunc", args[0], dtype="f64"), "i64")
    if name == "where":
        return select(args[0], cast(args[1], dtype), cast(args[2], dtype))
    if name in ("and", "or", "not"):
        return apply(name, *(truth(arg) for arg in args), dtype="bool")
    real = name in ("div", "sqrt") or any(arg.dtype == "f64" for arg in args)
    args = [cast(arg, "f64" if real else "i64") for arg in args]
    if name == "pow" and not real:
        return cast(apply("pow", *(cast(a, "f64") for a in args), dtype="f64"), dtype)
    return apply(name, *args, dtype="bool" if dtype == "bool" else args[0].dtype)
