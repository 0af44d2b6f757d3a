"""What extraction works on: leaves, values of nodes, calls that stay calls, conversions."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from mpcompile.codegen import aten_rules as rules
from mpcompile.codegen.expr import Constant, Expr, cast, constant, uniform_set

DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.bool: "bool",
}

NUM_ELEMENTS = "num_elements"
"""The leaf that holds how many elements the tensor has."""


NOBODY, SEVERAL = -1, -2
"""Owners of what belongs to no parameter, such as a learning rate, or was made from several."""


@dataclass(frozen=True)
class Leaf:
    """What a placeholder stands for. ``owner`` is the parameter it belongs to, or NOBODY."""

    name: str
    owner: int


@dataclass(frozen=True)
class Value:
    """What a node computes. ``shape`` is None for a Python number; ``owner`` may be SEVERAL.

    ``items`` are the elements of a short vector of uniform values, such as a stack of norms; its
    ``expr`` says nothing then.
    """

    expr: Expr
    shape: tuple[int, ...] | None
    owner: int
    items: tuple[Expr, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether this is one number, in however many dimensions."""
        if self.items:
            return False
        return self.shape in (None, ()) or self.expr in uniform_set([self.expr])


@dataclass(frozen=True)
class Call:
    """An ATen call that stays one: ``result`` is the buffer it fills.

    ``args`` and ``kwargs`` hold ``Value`` where the graph has a node, else what the graph has.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: str
    index: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Extracted:
    """The values of the outputs of a graph, in order, and the calls they need, by owner."""

    outputs: list[Value] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)


def round_constant(value: float, dtype: str) -> Expr:
    """Return the literal ``value`` rounded to ``dtype``."""
    if dtype == "f32" and math.isfinite(value):
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if dtype in ("i64", "bool"):
        value = int(value)
    return constant(value, dtype)


def convert(expr: Expr, dtype: str) -> Expr:
    """Return ``expr`` as ``dtype``; literals are converted here."""
    if isinstance(expr, Constant) and dtype not in ("f16", "bf16"):
        return round_constant(expr.value, dtype)
    if dtype == "bool":
        return rules.truth(expr)
    return cast(expr, dtype)


def compute_dtype(dtype: str) -> str:
    """Return what ATen computes in for tensors of ``dtype``."""
    return "f32" if dtype in ("f16", "bf16") else dtype
