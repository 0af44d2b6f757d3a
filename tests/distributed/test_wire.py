"""What is divided when, and how float16 buckets are scaled."""

from __future__ import annotations

import math

import pytest
import torch

from mpcompile.distributed import wire


@pytest.mark.parametrize(
    ("world", "expected"),
    [(1, 1), (2, 2), (3, 2), (4, 2), (5, 4), (8, 4), (16, 4), (64, 8), (4096, 64)],
)
def test_predivision_is_a_power_of_two_near_the_root(world: int, expected: int) -> None:
    assert wire.predivision(world) == expected
    assert wire.post_factor(world) == pytest.approx(expected / world)


@pytest.mark.parametrize(("largest", "expected"), [(1024.0, 1.0), (1.0, 1024.0), (3.0, 256.0)])
def test_scale_puts_the_largest_sum_below_the_target(largest: float, expected: float) -> None:
    scale = wire.scale_for(largest)
    assert scale == expected
    assert wire.TARGET / 2 < largest * scale <= wire.TARGET


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_scale_is_one_where_nothing_is_known(largest: float) -> None:
    assert wire.scale_for(largest) == 1.0


def test_scale_of_tiny_sums_stays_finite() -> None:
    assert math.isfinite(wire.scale_for(1e-38))


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16])
def test_cast_rounds_once_and_takes_any_strides(wire_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(5, 3).t(), torch.randn(4), torch.randn(2, 2).bfloat16(), torch.randn(())]
    sent = torch.empty(24, dtype=wire_dtype)
    scale = 1 / 3
    wire.cast_into(sent, grads, scale)
    flat = torch.cat([grad.float().reshape(-1) for grad in grads])
    assert torch.equal(sent, (flat * scale).to(wire_dtype))


def test_largest_magnitude_shows_what_is_not_finite() -> None:
    assert wire.largest_magnitude(torch.tensor([1.0, -3.0]).half()).item() == 3.0
    assert wire.largest_magnitude(torch.tensor([1.0, -math.inf]).half()).item() == math.inf
    assert math.isnan(wire.largest_magnitude(torch.tensor([math.nan, 1.0])).item())


def test_largest_finite_magnitude_leaves_out_what_is_not() -> None:
    grads = [torch.tensor([1.0, -math.inf]), torch.empty(0), torch.tensor([math.nan, -3.0]).half()]
    assert wire.largest_finite(grads).item() == 3.0
