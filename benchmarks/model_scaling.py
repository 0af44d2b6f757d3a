"""Model what a step costs on many ranks, and what its sums lose: the tables of docs/scaling.md.

Time: compute, and an all-reduce whose volume and latency follow the algorithm (Thakur, Rabenseifner
and Gropp 2005). Nothing overlaps, so it is an upper bound. Accuracy: ranks' gradients are added one
after the other and rounded after each, as a ring does it in the dtype on the wire::

    python benchmarks/model_scaling.py
    python benchmarks/model_scaling.py --params 5.2e6 --compute-ms 45 --worlds 2 --gbits 1 10
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpcompile.distributed import wire

DTYPES = (torch.float32, torch.float16)
ROUNDED = (torch.float16, torch.bfloat16)


def ring_seconds(world: int, size_bytes: float, bits_per_s: float, latency_s: float) -> float:
    """Return the time of a ring: every rank sends ``2 (n - 1) / n`` of the data in as many hops."""
    sent = 2 * (world - 1) / world * size_bytes
    return 8 * sent / bits_per_s + 2 * (world - 1) * latency_s


def tree_seconds(world: int, size_bytes: float, bits_per_s: float, latency_s: float) -> float:
    """Return the time of a pipelined double tree: the data twice, ``2 log2 n`` hops."""
    return 8 * 2 * size_bytes / bits_per_s + 2 * math.ceil(math.log2(world)) * latency_s


def time_rows(arguments: argparse.Namespace) -> list[list[object]]:
    """Return modelled step times in milliseconds, one row a number of ranks."""
    rows: list[list[object]] = []
    for world in arguments.worlds:
        row: list[object] = [world]
        for gbits in arguments.gbits:
            for dtype in DTYPES:
                size_bytes = arguments.params * dtype.itemsize
                for seconds in (ring_seconds, tree_seconds):
                    link = (gbits * 1e9 * arguments.efficiency, arguments.latency_us * 1e-6)
                    total = arguments.compute_ms + 1e3 * seconds(world, size_bytes, *link)
                    row.append(f"{total:.0f}")
        rows.append(row)
    return rows


def time_headers(gbits: Sequence[float]) -> list[str]:
    """Return the heads of the columns of ``time_rows``."""
    return ["ranks"] + [
        f"{rate:g}G {str(dtype).removeprefix('torch.float')} {algorithm}"
        for rate in gbits
        for dtype in DTYPES
        for algorithm in ("ring", "tree")
    ]


def sum_error(world: int, dtype: torch.dtype, num_elements: int = 1 << 14) -> float:
    """Return the relative error of the mean of ``world`` noisy gradients, in the 2-norm.

    Each gradient is a common part and as much noise, spread over four decades of magnitude.
    """
    generator = torch.Generator().manual_seed(0)
    decades = 10 ** (-4 * torch.rand(num_elements, generator=generator))
    common = torch.randn(num_elements, generator=generator) * decades
    exact = torch.zeros(num_elements, dtype=torch.float64)
    on_wire = torch.zeros(num_elements, dtype=dtype)
    scale = 1.0
    if dtype is torch.float16:
        bound = common.abs().max() * world / wire.predivision(world)
        scale = wire.scale_for(float(bound))
    for _ in range(world):
        noise = torch.randn(num_elements, generator=generator) * decades
        gradient = common + noise
        exact += gradient.double() / world
        on_wire += (gradient * (scale / wire.predivision(world))).to(dtype)
    mean = on_wire.double() * (wire.post_factor(world) / scale)
    return float((mean - exact).norm() / exact.norm())


def accuracy_rows(worlds: Sequence[int]) -> list[list[object]]:
    """Return what is divided off before the cast, where it loses bits, and errors of sums."""
    rows: list[list[object]] = []
    for world in worlds:
        power = wire.predivision(world)
        errors = [f"{sum_error(world, dtype):.1e}" for dtype in ROUNDED]
        overflow = 65504 * power / world
        rows.append([world, power, f"{power * 2.0**-14:.1e}", f"{overflow:.0f}", *errors])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description="Model step times and rounding against the number of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--params", type=float, default=1e9, help="trained parameters")
    add("--compute-ms", type=float, default=300.0, help="step time of one rank alone")
    add("--worlds", type=int, nargs="+", default=[8, 16, 64, 256, 1024, 4096], help="ranks")
    add("--gbits", type=float, nargs="+", default=[10, 100, 400], help="link speeds, Gbit/s")
    add("--latency-us", type=float, default=10.0, help="of one hop")
    add("--efficiency", type=float, default=0.9, help="of the link's speed that data gets")
    arguments = parser.parse_args(argv)
    print("\nstep, ms, modelled\n")
    print(tabulate(time_rows(arguments), time_headers(arguments.gbits), disable_numparse=True))
    print("\nfloat16 without a scale, and errors of sums in the wire dtype\n")
    headers = ("ranks", "divided before", "inexact below", "overflow above", "float16", "bfloat16")
    print(tabulate(accuracy_rows(arguments.worlds), headers, disable_numparse=True))


if __name__ == "__main__":
    main()
