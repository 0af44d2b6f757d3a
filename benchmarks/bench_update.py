"""Time the update of AdamW with clipping and 16-bit copies, against what people run today.

    python benchmarks/bench_update.py                     50 tensors of 21 M, and 2,000 of 8.7 M
    python benchmarks/bench_update.py --first-call        seconds of the first call, cold and warm
    python benchmarks/bench_update.py --device cuda       on a card, and for 1 B parameters

Rows take turns, and every call starts from the same gradients: unscaling and clipping work in
place, so a second call on what the first left would time denormals. All rows do the same number of
steps, and their parameters are compared at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.update_on_cuda import print_tables
from mpcompile.codegen.build import build_library
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.guarding import guarded_plan
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.table import build_chunks
from mpcompile.runtime.update import OptimizerUpdate

LR, DECAY, MAX_NORM, SCALE = 1e-3, 0.01, 1.0, 1024.0
LAYER = [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048)] + [(512,)] * 5
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "50 tensors": [(8192, 512)] * 2 + LAYER * 4,
    "2,000 tensors": [(66, 66)] * 2000,
}


@dataclass
class Row:
    """One way to update. ``run`` is what is timed; ``params`` are its own."""

    name: str
    params: list[nn.Parameter]
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)


def make_params(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return parameters that are the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def make_grads(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return gradients that are the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def halves(
    params: Sequence[nn.Parameter], dtype: torch.dtype = torch.bfloat16
) -> dict[torch.Tensor, torch.Tensor]:
    """Return a 16-bit copy of each parameter."""
    return {param: param.detach().to(dtype) for param in params}


def scaler_row(shapes: Sequence[tuple[int, ...]]) -> Row:
    """What autocast users run in fp16, weight casts of the next forward included."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones(()))
    copies = list(halves(params).values())

    def run() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(copies, [param.detach() for param in params])

    return Row("GradScaler + clip + fused AdamW + weight casts", params, run)


def fused_row(shapes: Sequence[tuple[int, ...]], clip: bool) -> Row:
    """Torch's fused AdamW, with foreach clipping or alone."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)

    def run() -> None:
        if clip:
            nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()

    return Row("clip + fused AdamW" if clip else "fused AdamW alone", params, run)


def inductor_row(shapes: Sequence[tuple[int, ...]]) -> Row:
    """AdamW and clipping, each compiled by Inductor."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)

    @torch.compile
    def run() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return Row("Inductor: clip + AdamW", params, run)


class _Tensor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "mean", "square", "grad", "copy")),
        ("size", ctypes.c_int64),
    ]


def yardstick_row(shapes: Sequence[tuple[int, ...]]) -> Row:
    """The kernel a person writes for exactly this update, on tensors as AdamW allocates them."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=0.0, weight_decay=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()  # makes the state and leaves zeros in it
    copies = halves(params)
    chunks = build_chunks([param.numel() for param in params])
    pieces = torch.tensor([list(chunks.row), list(chunks.begin), list(chunks.end)]).t().contiguous()
    library = build_library((Path(__file__).parent / "yardstick_update.cpp").read_text()).library
    library.sum_of_squares.restype = ctypes.c_double
    settings = (ctypes.c_double * 6)(LR, 0.9, 0.999, 1e-8, DECAY, 0.0)
    skip, table = ctypes.c_float(0.0), (_Tensor * len(params))()
    keep = (optimizer, copies)

    def run() -> None:
        if not table[0].size:
            for entry, param in zip(table, params, strict=True):
                state = keep[0].state[param]
                tensors = (param, state["exp_avg"], state["exp_avg_sq"], param.grad, copies[param])
                names = ("param", "mean", "square", "grad", "copy")
                for name, tensor in zip(names, tensors, strict=True):
                    setattr(entry, name, tensor.data_ptr())
                entry.size = param.numel()
        shape = (table, ctypes.c_void_p(pieces.data_ptr()), ctypes.c_int64(len(pieces)))
        threads = torch.get_num_threads()
        norm = library.sum_of_squares(*shape, threads) ** 0.5
        factor = ctypes.c_float(min(1.0, MAX_NORM / (norm + 1e-6)))
        settings[5] += 1
        library.adamw(*shape, threads, settings, factor, ctypes.byref(skip))

    return Row("hand-written yardstick", params, run)


def our_row(shapes: Sequence[tuple[int, ...]]) -> Row:
    """The generated kernel: norm, clip, AdamW, bf16 copy; all checks of a launch included."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)
    update = OptimizerUpdate(optimizer)
    update.set_copies(halves(params))
    plan = GradPlan(clips=(ClipNorm(MAX_NORM),))
    return Row("mpcompile", params, lambda: update.run(plan=plan))


def our_float16_row(shapes: Sequence[tuple[int, ...]], clip: bool) -> Row:
    """The same behind a loss scale: scaled gradients in float16, one that overflows skips it."""
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)
    update, scale = OptimizerUpdate(optimizer), LossScale(ScalePolicy(initial=SCALE))
    update.set_copies(halves(params, torch.float16))
    grads = [(grad * SCALE).half() for grad in make_grads(shapes)]
    plan = GradPlan(clips=(ClipNorm(MAX_NORM),) if clip else ())

    def run() -> None:
        scale.begin_call()
        update.run(grads, guarded_plan(plan, scale, optimizer, grads, is_scaled=True))
        scale.end_call(failed=False)

    return Row(f"mpcompile float16{', clipped' if clip else ''}", params, run)


def measure(shapes: list[tuple[int, ...]], args: argparse.Namespace) -> list[Row]:
    """Run all rows in turns and return them with their times."""
    rows = [scaler_row(shapes), fused_row(shapes, clip=True), fused_row(shapes, clip=False)]
    if len(shapes) <= args.inductor_tensors:
        rows.append(inductor_row(shapes))
    rows.append(yardstick_row(shapes))
    rows += [our_float16_row(shapes, clip) for clip in (False, True)]
    rows.append(our_row(shapes))
    fresh = make_grads(shapes)
    for step in range(args.warmup + args.steps):
        for row in rows:
            for param, grad in zip(row.params, fresh, strict=True):
                if param.grad is None:
                    param.grad = grad.clone()
                else:
                    param.grad.copy_(grad)
            start = time.perf_counter()
            row.run()
            if step >= args.warmup:
                row.seconds.append(time.perf_counter() - start)
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    """Return a table: time, spread, speed and how far parameters are from clip + fused AdamW."""
    reference, ours = rows[1].params, statistics.median(rows[-1].seconds)
    lines = []
    for row in rows:
        median = statistics.median(row.seconds)
        low, high = min(row.seconds), max(row.seconds)
        far = max(
            float((a - b).detach().norm() / b.detach().norm())
            for a, b in zip(row.params, reference, strict=True)
        )
        clips = row.name not in ("fused AdamW alone", "mpcompile float16")
        note = f"{far:.0e}" if clips else "not clipped"
        spread = f"{low * 1e3:.2f} - {high * 1e3:.2f}"
        lines.append((row.name, f"{median * 1e3:.2f}", spread, f"{median / ours:.2f}", note))
    headers = ("row", "median ms", "range ms", "times ours", "params differ by")
    return tabulate(lines, headers=headers, disable_numparse=True)


def first_call(count: int, cache_dir: Path) -> float:
    """Return the seconds of the first fused call for ``count`` tensors, state being there."""
    shapes = [(64, 64), (64,)] * (count // 2)
    params = make_params(shapes)
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    update = OptimizerUpdate(optimizer, cache_dir=cache_dir)
    start = time.perf_counter()
    outcome = update.run()
    assert outcome.fused, outcome.reason
    return time.perf_counter() - start


def print_first_calls() -> None:
    """Run the first call in fresh processes, with an empty cache and with a full one."""
    lines = []
    for count in (50, 2000):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--first-call-of", str(count), "--cache", folder]
            done = [
                subprocess.run(command, check=True, capture_output=True, text=True)
                for _ in range(2)
            ]
        lines.append((count, *(result.stdout.strip() for result in done)))
    print(tabulate(lines, headers=("tensors", "cold s", "warm s"), disable_numparse=True))


def main() -> None:
    """Parse arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--inductor-tensors", type=int, default=50, help="most tensors to compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--first-call", action="store_true")
    parser.add_argument("--first-call-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_call_of:
        print(f"{first_call(args.first_call_of, args.cache):.2f}")
        return
    if args.device == "cuda":
        print_tables(SHAPES, args)
        return
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, ", end=""
    )
    print(f"torch {torch.__version__}")
    if args.first_call:
        print_first_calls()
        return
    for name, shapes in SHAPES.items():
        print(f"\n{name}, {sum(torch.Size(s).numel() for s in shapes) / 1e6:.1f} M parameters")
        print(format_rows(measure(shapes, args)))


if __name__ == "__main__":
    main()
