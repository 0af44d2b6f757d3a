"""Constants and ops that float16 has no room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpcompile.config import Config
from mpcompile.graph.half_range import out_of_range
from mpcompile.passes import AssignPrecision
from mpcompile.precision import PAINTED, Precision
from tests.checking import Traced, trace_function

X = torch.randn(4, 4)
LOWEST = torch.finfo(torch.float32).min


def mask() -> Tensor:
    """Made inside of what is traced."""
    return torch.ones(4, 4).triu(1).bool()


def reasons(function: Callable[..., Any], *args: Tensor) -> dict[str, str]:
    gm = trace_function(function, args or (X,)).gm
    return {node.name: reason for node, reason in out_of_range(gm.graph, PAINTED).items()}


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (lambda x: x.masked_fill(mask(), -1e9), "masked_fill", "constant -1e+09 is beyond"),
        (lambda x: torch.where(mask(), LOWEST, x), "where", "holds constants beyond"),
        (lambda x: x + torch.full((4, 4), LOWEST), "add", "holds constants beyond"),
        (lambda x: x + mask().float() * -1e9, "add", "holds constants beyond"),
        (lambda x: x + 1e-8, "add", "constant 1e-08 vanishes"),
        (lambda x: x.clamp(min=1e-12), "clamp", "constant 1e-12 vanishes"),
        (lambda x: x * 1e5, "mul", "constant 100000 is beyond"),
        (lambda x: x * x, "mul", "a square"),
        (lambda x: x.square(), "pow_1", ""),
        (lambda x: x / 1e-6, "div", "constant 1e-06 vanishes"),
    ],
)
def test_node_is_named_with_its_reason(
    function: Callable[[Tensor], Tensor], name: str, words: str
) -> None:
    assert words in reasons(function).get(name, "")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(mask(), float("-inf")),
        lambda x: x * 0.125 + 1.0,
        lambda x: x * x.flip(0),
        lambda x: x[:, : 2**40],
        lambda x: x.masked_fill(mask(), -1e4),
        lambda x: torch.softmax(x.masked_fill(mask(), -1e9), -1) * 0.5 @ x * 0.5,
    ],
    ids=["-inf", "ordinary", "product", "slice", "-1e4", "behind softmax"],
)
def test_what_fits_is_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    found = reasons(function)
    assert not [name for name in found if name.startswith(("mul", "add", "slice"))]


def test_masks_reach_softmax_in_fp32_and_only_in_float16() -> None:
    def attention(x: Tensor) -> Tensor:
        scores = (x @ x).masked_fill(mask(), -1e9)
        return torch.softmax(scores, -1) @ x

    def decided(dtype: str) -> Traced:
        config = Config.from_options({"dtype": dtype}, environ={})
        traced = trace_function(attention, [X], config)
        traced.run(AssignPrecision())
        return traced

    assert decided("fp16").precision("aten.masked_fill") is Precision.FP32
    assert "beyond float16's 65504" in decided("fp16").reason("aten.masked_fill")
    assert "beyond" not in decided("bf16").reason("aten.masked_fill")


def test_override_of_the_user_wins() -> None:
    options = {"dtype": "fp16", "keep_half": ["aten.mul"]}
    traced = trace_function(lambda x: (x @ x) * 1e-7, [X], Config.from_options(options, environ={}))
    traced.run(AssignPrecision())
    assert traced.precision("aten.mul") is Precision.HALF
