"""Compile one row in this process and print how long it took, as JSON.

``bench_step.py`` starts this in fresh processes: cold with empty caches, warm with those that the
cold one left. Beside the seconds on the clock it gives those that processors worked, compilers that
were started included: on a machine that does other things too, only these can be compared. By
hand::

    python -m benchmarks.compile_time mpcompile step
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import ROWS, build_program
from examples.train_gpt import Settings, load_corpus, measure_seconds

COMPILING_CALLS = 3  # the optimizer graph is compiled again at the second
STEADY_CALLS = 5


class CompileTime(NamedTuple):
    """Seconds by the clock, and of work by processors."""

    wall: float
    cpu: float


def measure_row(row: str, what: str, settings: Settings) -> CompileTime:
    """Return what the first calls took above their steady time."""
    program = build_program(ROWS[row], settings, load_corpus()[0])
    function = program.step if what == "step" else program.forward_backward
    times = []
    for _ in range(COMPILING_CALLS + STEADY_CALLS):
        times.append(_time_call(function, *next(program.batches)))
        if what != "step":
            program.model.zero_grad(set_to_none=True)
    return CompileTime(*(_above_steady(seconds) for seconds in zip(*times, strict=True)))


def _time_call(function: Callable[..., Any], *args: Any) -> CompileTime:
    before = _cpu_seconds()
    wall = measure_seconds(function, *args)[1]
    return CompileTime(wall, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    """Return what this process has used, and those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _above_steady(seconds: Sequence[float]) -> float:
    steady = statistics.median(seconds[COMPILING_CALLS:])
    return sum(seconds[:COMPILING_CALLS]) - COMPILING_CALLS * steady


def measure_cold_and_warm(
    row: str, what: str, settings: Settings
) -> tuple[CompileTime, CompileTime]:
    """Compile a row in two fresh processes, the first with empty caches."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.compile_time", row, what]
    command += ["--settings", json.dumps(dataclasses.asdict(settings))]
    with tempfile.TemporaryDirectory(prefix="bench_step_") as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "MPCOMPILE_CACHE_DIR": f"{cache}/mpcompile",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # workers are not waited for, so not counted
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        }
        cold, warm = (_run(command, environment) for _ in range(2))
    return cold, warm


def _run(command: Sequence[str], environment: dict[str, str]) -> CompileTime:
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
    found = json.loads(finished.stdout.splitlines()[-1])
    return CompileTime(found["compile_s"], found["compile_cpu_s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description="Compile one row and print how long it took.")
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("what", choices=("step", "forward_backward"))
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of Settings, JSON")
    arguments = parser.parse_args(argv)
    settings = Settings(**arguments.settings)
    seconds = measure_row(arguments.row, arguments.what, settings)
    print(json.dumps({"compile_s": seconds.wall, "compile_cpu_s": seconds.cpu}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
