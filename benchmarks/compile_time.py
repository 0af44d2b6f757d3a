"""Compile one row in this process and print how long it took, as JSON.

``bench_step.py`` starts this in fresh processes: cold with an empty Inductor cache, warm with the
cache that the cold one left. By hand::

    python -m benchmarks.compile_time mpcompile step
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import ROWS, build_program
from examples.train_gpt import Settings, load_corpus, measure_seconds

COMPILING_CALLS = 3  # the optimizer graph is compiled again at the second
STEADY_CALLS = 5


def measure_row(row: str, what: str, settings: Settings) -> float:
    """Return the seconds that the first calls took above their steady time."""
    program = build_program(ROWS[row], settings, load_corpus()[0])
    function = program.step if what == "step" else program.forward_backward
    times = []
    for _ in range(COMPILING_CALLS + STEADY_CALLS):
        times.append(measure_seconds(function, *next(program.batches))[1])
        if what != "step":
            program.model.zero_grad(set_to_none=True)
    steady = statistics.median(times[COMPILING_CALLS:])
    return sum(times[:COMPILING_CALLS]) - COMPILING_CALLS * steady


def measure_cold_and_warm(row: str, what: str, settings: Settings) -> tuple[float, float]:
    """Compile a row in two fresh processes, the first with an empty cache."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.compile_time", row, what]
    command += ["--settings", json.dumps(dataclasses.asdict(settings))]
    with tempfile.TemporaryDirectory(prefix="bench_step_") as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        }
        cold, warm = (_run(command, environment) for _ in range(2))
    return cold, warm


def _run(command: Sequence[str], environment: dict[str, str]) -> float:
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
    return float(json.loads(finished.stdout.splitlines()[-1])["compile_s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description="Compile one row and print how long it took.")
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("what", choices=("step", "forward_backward"))
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of Settings, JSON")
    arguments = parser.parse_args(argv)
    settings = Settings(**arguments.settings)
    seconds = measure_row(arguments.row, arguments.what, settings)
    print(json.dumps({"compile_s": seconds}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
