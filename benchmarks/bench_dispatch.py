"""Measure what a call of a compiled step costs beside its arithmetic, for many small parameters.

A step over ``n`` parameters of 16 elements does next to no arithmetic, so its time is guards,
argument handling, the graph's own ops, and the optimizer. Both rows run the same graph op by op (no
generated kernels): the peer compiles the forward and steps a fused AdamW, mpcompile captures the
step whole. Calls take turns; the ratio of the two is what counts::

    python benchmarks/bench_dispatch.py
    python benchmarks/bench_dispatch.py --parameters 100 2000 --repeats 15
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import describe_machine

ELEMENTS = 16


class Many(nn.Module):
    """A sum over products with ``count`` parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(ELEMENTS) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number; ``x`` has ``ELEMENTS``."""
        return torch.stack([x * weight for weight in self.weights]).square().sum()


def build_peer(count: int) -> Callable[[Tensor], Any]:
    """Return a step that compiles the forward and steps a fused optimizer."""
    model = Many(count)
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    forward: Any = torch.compile(model, backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        loss: Tensor = forward(x)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def build_ours(count: int) -> Callable[[Tensor], Any]:
    """Return a step that is captured whole."""
    model = Many(count)
    opt = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    options: Any = {"lowering": "eager", "dtype": "float32", "check": "off"}
    compiled: Callable[[Tensor], Any] = torch.compile(step, backend="mpcompile", options=options)
    return compiled


def measure(count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return seconds a call of both, the median of five calls a turn."""
    rows = (build_peer(count), build_ours(count))
    x = torch.randn(ELEMENTS)
    for row in rows:
        for _ in range(4):
            row(x)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for row, found in zip(rows, times, strict=True):
            found.append(statistics.median(_seconds(row, x) for _ in range(5)))
    return times


def _seconds(step: Callable[[Tensor], Any], x: Tensor) -> float:
    begin = time.perf_counter()
    step(x)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print one line a parameter count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 2000])
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    lines = []
    for count in arguments.parameters:
        peer, ours = measure(count, arguments.repeats)
        ratios = [b / a for a, b in zip(peer, ours, strict=True)]
        lines.append(
            (
                count,
                f"{statistics.median(peer) * 1e3:.2f}",
                f"{statistics.median(ours) * 1e3:.2f}",
                f"{statistics.median(ratios):.2f}",
            )
        )
    print(describe_machine("cpu"))
    print(tabulate(lines, ("parameters", "peer, ms", "mpcompile, ms", "ratio")))


if __name__ == "__main__":
    main()
