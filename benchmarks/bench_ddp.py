"""One rank of a comparison of DDP programs on two ranks; ``bench_ddp.sh`` starts both.

Rows take turns, so that a machine or a link that slows down slows all of them. Bytes are read from
the counters of the network interface that the ranks talk over, so they include what TCP and Gloo
add. Every row starts from the same weights and sees the same batches::

    sudo benchmarks/bench_ddp.sh
    sudo benchmarks/bench_ddp.sh --turns 10 --rates "1gbit none"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import describe_machine
from examples.train_gpt import GPT, Settings, Step, build_optimizer, load_corpus, sample_batch

SETTINGS = Settings(layers=6, width=264, heads=3, context=64, batch_size=4, lr=3e-4)
STOCK, HOOK, BY_HAND = "stock", "hook", "by-hand"
ROWS = {
    STOCK: "stock DDP, eager",
    HOOK: "stock DDP, eager, fp16_compress_hook",
    BY_HAND: "stock DDP, Inductor, autocast bf16, fp16_compress_hook",
    "float32": "mpcompile, float32 wire",
    "bfloat16": "mpcompile, bfloat16 wire",
    "float16": "mpcompile, float16 wire",
}


@dataclass
class Row:
    """One way to train, and what was measured of it; times in seconds, one a turn."""

    name: str
    model: DistributedDataParallel
    step: Step
    rng: torch.Generator
    turns: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def build_row(name: str, dtype: str, rank: int) -> Row:
    """Build model, optimizer and step of a row."""
    torch.manual_seed(SETTINGS.seed)
    model = DistributedDataParallel(GPT(SETTINGS))
    opt = build_optimizer(model.module, SETTINGS, fused=True)

    run_model = torch.compile(model) if name == BY_HAND else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if name == BY_HAND else nullcontext():
            loss = F.cross_entropy(run_model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    if name in (HOOK, BY_HAND):
        model.register_comm_hook(None, fp16_compress_hook)
    chosen: Any = step
    if name not in (STOCK, HOOK, BY_HAND):
        options: dict[str, Any] = {"dtype": dtype, "wire_dtype": name}
        chosen = torch.compile(step, backend="mpcompile", options=options)
    return Row(name, model, chosen, torch.Generator().manual_seed(rank))


def run_turn(row: Row, text: Tensor, steps: int, counter: Path, is_counted: bool) -> None:
    """Run some steps of a row and note the median time and the bytes sent."""
    dist.barrier()
    before, times = int(counter.read_text()), []
    for _ in range(steps):
        x, y = sample_batch(text, SETTINGS, row.rng)
        start = time.perf_counter()
        loss = row.step(x, y)
        times.append(time.perf_counter() - start)
        row.losses.append(loss.item())
    if is_counted:
        row.turns.append(statistics.median(times))
        row.sent_bytes.append((int(counter.read_text()) - before) / steps)


def measure_link(num_elements: int, dtype: torch.dtype, calls: int = 7) -> float:
    """Return the median time of an all-reduce alone, in seconds."""
    values, times = torch.zeros(num_elements, dtype=dtype), []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def format_results(rows: Sequence[Row], num_params: int) -> str:
    """Lay the rows out: times as medians over turns, ratios within a turn, bytes, last losses."""
    by_name = {row.name: row for row in rows}
    lines = []
    for row in rows:
        ratios = [
            statistics.median(
                mine / other for mine, other in zip(row.turns, by_name[peer].turns, strict=True)
            )
            for peer in (STOCK, HOOK)
        ]
        low, _, high = statistics.quantiles(row.turns, n=4)
        lines.append(
            (
                ROWS[row.name],
                f"{1e3 * statistics.median(row.turns):.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})",
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{statistics.median(row.sent_bytes) / num_params:.2f}",
                f"{statistics.fmean(row.losses[-10:]):.4f}",
            )
        )
    headers = ("", "step ms (quartiles)", "of stock", "of hook", "bytes a parameter", "loss")
    return tabulate(lines, headers, disable_numparse=True)


def natural_dtype() -> str:
    """Return bfloat16 where the processor computes in it; elsewhere it is slower than float32."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if has_bf16 else "float32"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; the script adds the first two."""
    parser = argparse.ArgumentParser(
        description="One rank of bench_ddp.sh.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--interface", required=True, help="network interface whose counters are read")
    add("--label", default="", help="what the link is, for the heading")
    add("--rows", default=",".join(ROWS), help="which rows, with commas")
    add("--dtype", default=natural_dtype(), help="what mpcompile computes in")
    add("--turns", type=int, default=7, help="how often each row has its turn")
    add("--steps", type=int, default=5, help="steps a turn")
    add("--warmup", type=int, default=4, help="steps before, for compilation")
    add("--json", type=Path, help="where the figures are written too")
    arguments = parser.parse_args(argv)
    arguments.rows = arguments.rows.split(",")
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown or not {STOCK, HOOK} <= set(arguments.rows):
        parser.error(f"--rows: {unknown or 'stock and hook'}; they are {', '.join(ROWS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 prints."""
    arguments = parse_arguments(argv)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    counter = Path(f"/sys/class/net/{arguments.interface}/statistics/tx_bytes")
    text, _ = load_corpus()
    rows = [build_row(name, arguments.dtype, rank) for name in arguments.rows]
    num_params = sum(p.numel() for p in rows[0].model.parameters())
    alone = [measure_link(num_params, dtype) for dtype in (torch.float32, torch.float16)]
    for row in rows:
        run_turn(row, text, arguments.warmup, counter, is_counted=False)
    for _ in range(arguments.turns):
        for row in rows:
            run_turn(row, text, arguments.steps, counter, is_counted=True)
    if rank == 0:
        print(f"\n{describe_machine('cpu')}")
        what = f"GPT of {num_params / 1e6:.2f} M parameters, 2 ranks"
        print(f"{arguments.label}: {what}, mpcompile computes in {arguments.dtype}\n")
        print(format_results(rows, num_params))
        link = [f"{1e3 * seconds:.0f} ms" for seconds in alone]
        print(
            f"\nall gradients in one all-reduce: float32 {link[0]}, float16 {link[1]}", flush=True
        )
        if arguments.json is not None:
            figures = {r.name: {"turns_s": r.turns, "bytes": r.sent_bytes} for r in rows}
            arguments.json.write_text(json.dumps(figures) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
