"""The rows of ``bench_update.py --device cuda``: AdamW on a card, against what torch has.

A step moves 28 bytes an element (parameter, gradient and two moments read, three written). What a
copy on the same card moves a second is measured first, and speeds are shares of it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.record import memory_bandwidth
from mpcompile.runtime.update import OptimizerUpdate

STEP_BYTES, NORM_BYTES = 28, 4
MAX_NORM = 1.0
BILLION: dict[str, list[tuple[int, ...]]] = {
    "1 B parameters": [(8192, 4096)] * 29 + [(4096,)] * 120
}


@dataclass
class CudaRow:
    """One way to update. ``run`` is what is timed, ``launches`` how many kernels it starts."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    launches: int = 0
    seconds: list[float] = field(default_factory=list)


def _params(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def _torch_step(params: list[nn.Parameter], clip: bool, **options: Any) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(params, **options)

    def run() -> None:
        if clip:
            nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()

    return run


def _our_step(params: list[nn.Parameter], clip: bool) -> Callable[[], object]:
    update = OptimizerUpdate(torch.optim.AdamW(params))
    plan = GradPlan(clips=(ClipNorm(MAX_NORM),)) if clip else GradPlan()
    return lambda: update.run(plan=plan)


def _makers(clip: bool, compiles: bool) -> dict[str, Callable[[list[nn.Parameter]], Any]]:
    makers: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "fused=True": lambda params: _torch_step(params, clip, fused=True),
        "foreach": lambda params: _torch_step(params, clip, foreach=True),
        "mpcompile": lambda params: _our_step(params, clip),
    }
    if compiles:
        makers["Inductor: foreach"] = lambda params: torch.compile(
            _torch_step(params, clip, foreach=True, capturable=True)
        )
    return makers


def _count_launches(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return sum(
        event.device_type == kinds and not event.name.startswith("Mem") for event in found.events()
    )


def _time(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(
    shapes: Sequence[tuple[int, ...]], clip: bool, compiles: bool, args: argparse.Namespace
) -> list[CudaRow]:
    """Time each way by itself, so that one set of parameters is in memory at a time."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for name, make in _makers(clip, compiles).items():
        run = make(_params(shapes))
        row = CudaRow(name, run, count * (STEP_BYTES + (NORM_BYTES if clip else 0)))
        for _ in range(args.warmup):
            run()
        row.launches = _count_launches(run)
        row.seconds = [_time(run) for _ in range(args.steps)]
        rows.append(row)
        row.run = run = lambda: None
        torch.cuda.empty_cache()
    return rows


def format_rows(rows: Sequence[CudaRow], bytes_per_s: float) -> str:
    """Return a table: time, spread, speed as a share of a copy's, launches."""
    lines = []
    for row in rows:
        median = statistics.median(row.seconds)
        spread = f"{min(row.seconds) * 1e3:.3f} - {max(row.seconds) * 1e3:.3f}"
        speed = row.num_bytes / median
        share = f"{speed / bytes_per_s:.0%}"
        lines.append(
            (row.name, f"{median * 1e3:.3f}", spread, f"{speed / 1e9:.0f}", share, row.launches)
        )
    headers = ("row", "median ms", "range ms", "GB/s", "of a copy", "launches")
    return tabulate(lines, headers=headers, disable_numparse=True)


def print_tables(sets: dict[str, list[tuple[int, ...]]], args: argparse.Namespace) -> None:
    """Print one table for each set of tensors, without and with clipping.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise SystemExit("bench_update.py: there is no CUDA device for --device cuda.")
    device = torch.device("cuda")
    bandwidth = memory_bandwidth(1, device)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"copy {bandwidth / 1e9:.0f} GB/s"
    )
    for name, shapes in {**sets, **BILLION}.items():
        for clip in (False, True):
            print(f"\n{name}{', clipped by norm' if clip else ''}")
            rows = measure(shapes, clip, len(shapes) <= args.inductor_tensors, args)
            print(format_rows(rows, bandwidth))
