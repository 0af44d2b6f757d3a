"""Compare a GPT training step: eager fp32, Inductor fp32, Inductor + autocast bf16, mpcompile.

Rows take turns (A B C D A B C D ...), so that a machine that slows down slows all of them; ratios
are taken within a turn. Times are medians with quartiles. Compile times come from fresh processes.
Memory is the most that one step after warm-up holds above what lived before it: on CUDA from the
caching allocator, on the CPU as the sum over the profiler's record of tensor allocations (resident
memory would count the compiler, and scratch that kernels take by malloc counts on neither)::

    python benchmarks/bench_step.py
    python benchmarks/bench_step.py --no-compile-times --repeats 5 --json results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compile_time import measure_cold_and_warm
from benchmarks.rows import PEER, ROWS, Program, build_program, describe_machine
from examples.train_gpt import (
    Settings,
    load_corpus,
    measure_peak_bytes,
    measure_seconds,
    validation_loss,
)

Turns = dict[str, list[float]]  # by row, seconds of a call, the median of each turn


def measure_turns(
    programs: Mapping[str, Program], what: str, warmup: int, steps: int, repeats: int
) -> Turns:
    """Let the rows take turns at ``step`` or ``forward_backward`` and time every call."""
    for program in programs.values():
        _time_calls(program, what, warmup)
    turns: Turns = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            turns[name].append(statistics.median(_time_calls(program, what, steps)))
    return turns


def _time_calls(program: Program, what: str, calls: int) -> list[float]:
    function = program.step if what == "step" else program.forward_backward
    times = []
    for _ in range(calls):
        times.append(measure_seconds(function, *next(program.batches))[1])
        program.model.zero_grad(set_to_none=True)
    return times


def measure_compile_times(
    names: Sequence[str], settings: Settings, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds by row and by ``"step cold"``, ``"step warm cpu"`` and so on."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(repeats):
        for what in ("step", "forward_backward"):
            for name in names:
                print(f"compiling {what} of {ROWS[name].name} ...", file=sys.stderr)
                pair = measure_cold_and_warm(name, what, settings)
                for state, seconds in zip(("cold", "warm"), pair, strict=True):
                    found[name].setdefault(f"{what} {state}", []).append(seconds.wall)
                    found[name].setdefault(f"{what} {state} cpu", []).append(seconds.cpu)
    return found


def format_spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Return the median and, in brackets, the quartiles: ``1.03 (1.01-1.06)``."""
    middle = f"{statistics.median(values) * scale:.{digits}f}"
    if len(values) < 2:
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({low * scale:.{digits}f}-{high * scale:.{digits}f})"


def format_ratio(values: Sequence[float], peer: Sequence[float] | None) -> str:
    """Return the spread of the ratios within each turn; empty without a peer."""
    if peer is None:
        return ""
    return format_spread([a / b for a, b in zip(values, peer, strict=True)])


def format_steps(results: Mapping[str, Any]) -> str:
    """Lay out times, ratios to the peer, memory and loss: one line a row."""
    step, inner = results["step_s"], results["forward_backward_s"]
    rows = [
        (
            ROWS[name].name,
            format_spread(step[name], 1e3, 1),
            format_ratio(step[name], step.get(PEER)),
            format_spread(inner[name], 1e3, 1),
            format_ratio(inner[name], inner.get(PEER)),
            f"{results['peak_bytes'][name] / 2**20:.1f}",
            f"{results['loss'][name]:.4f}",
        )
        for name in step
    ]
    headers = [
        "",
        "step, ms",
        "to autocast",
        "forward+backward, ms",
        "to autocast",
        "peak memory\nof a step, MiB",
        f"validation loss\nafter {results['trained_steps']} steps",
    ]
    return tabulate(rows, headers, disable_numparse=True)


def format_compile_times(
    found: Mapping[str, Mapping[str, Sequence[float]]], suffix: str = ""
) -> str:
    """Lay out compile times in seconds, each with its ratio to the peer's."""
    columns = [
        f"{what} {state}{suffix}"
        for what in ("step", "forward_backward")
        for state in ("cold", "warm")
    ]
    rows = []
    for name, times in found.items():
        cells = [ROWS[name].name]
        for column in columns:
            peer = found[PEER][column] if PEER in found else None
            cells += [format_spread(times[column], digits=1), format_ratio(times[column], peer)]
        rows.append(cells)
    headers = [""]
    for column in columns:
        headers += [column.replace("forward_backward", "forward+\nbackward") + ", s", "to autocast"]
    return tabulate(rows, headers, disable_numparse=True)


def measure(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Measure all rows but for compile times; returns what ``--json`` writes."""
    train, held_out = load_corpus()
    # Rows share the code of torch's optimizers, so their compilations count together; at the limit
    # Dynamo would run a row eagerly without a word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    programs = {name: build_program(ROWS[name], settings, train) for name in arguments.rows}
    plan = (arguments.warmup, arguments.steps, arguments.repeats)
    step_s = measure_turns(programs, "step", *plan)
    peak_bytes = {
        name: measure_peak_bytes(program.step, *next(program.batches))[1]
        for name, program in programs.items()
    }
    loss = {name: evaluate(program, held_out, settings) for name, program in programs.items()}
    return {
        "machine": describe_machine(settings.device),
        "settings": dataclasses.asdict(settings),
        "trained_steps": arguments.warmup + arguments.steps * arguments.repeats + 1,
        "step_s": step_s,
        "forward_backward_s": measure_turns(programs, "forward_backward", *plan),
        "peak_bytes": peak_bytes,
        "loss": loss,
    }


def evaluate(program: Program, text: Tensor, settings: Settings) -> float:
    """Return the loss on held-out text, in eager fp32 for every row."""
    return validation_loss(program.model.loss, program.model, text, settings)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Compare a GPT training step four ways.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what to compare")
    add("--steps", type=int, default=5, help="timed steps a turn")
    add("--warmup", type=int, default=5, help="untimed steps at the start")
    add("--repeats", type=int, default=12, help="turns of each row")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--threads", type=int, help="CPU threads; torch's choice if left out")
    for name, value in {"layers": 4, "width": 256, "heads": 8, "context": 128}.items():
        add(f"--{name}", type=int, default=value, help=f"{name} of the GPT")
    add("--batch-size", type=int, default=16, help="sequences a step")
    add("--compile-times", action=argparse.BooleanOptionalAction, default=True, help="measure them")
    add("--compile-repeats", type=int, default=1, help="pairs of fresh processes for each")
    add("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch finds no GPU; use --device cpu, or a CUDA build of torch"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print both tables."""
    arguments = parse_arguments(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes = ("device", "layers", "width", "heads", "context", "batch_size")
    settings = Settings(**{name: getattr(arguments, name) for name in sizes})
    results = measure(arguments, settings)
    print(f"{results['machine']}\nGPT: {', '.join(f'{n} {getattr(settings, n)}' for n in sizes)}")
    print(f"{arguments.repeats} turns of {arguments.steps} steps: median (quartiles)\n")
    print(format_steps(results))
    if arguments.compile_times:
        names = [name for name in arguments.rows if ROWS[name].backend]
        results["compile_s"] = measure_compile_times(names, settings, arguments.compile_repeats)
        print("\nCompile time: a fresh process without a cache, then one with the cache it left\n")
        print(format_compile_times(results["compile_s"]))
        print("\nThe same in seconds of work, by this process and the compilers it starts\n")
        print(format_compile_times(results["compile_s"], " cpu"))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
