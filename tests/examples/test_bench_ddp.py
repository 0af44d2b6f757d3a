"""benchmarks/bench_ddp.sh and model_scaling.py: what they print, and when they skip."""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks import bench_ddp, model_scaling

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_ddp.sh"


def with_program(folder: Path, name: str, text: str) -> dict[str, str]:
    """Return an environment in which ``name`` prints ``text``."""
    program = folder / name
    program.write_text(f"#!/bin/sh\necho {text}\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [("id", "1000", "needs root; run it with sudo"), ("uname", "Darwin", "namespaces are Linux's")],
)
def test_script_says_why_it_skips(tmp_path: Path, name: str, text: str, reason: str) -> None:
    environment = with_program(tmp_path, name, text)
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("bench_ddp.sh: skipped: ")
    assert reason in done.stdout


def test_table_compares_rows_within_a_turn_and_counts_bytes_a_parameter() -> None:
    def row(name: str, turns: list[float], sent: float) -> bench_ddp.Row:
        nothing = cast(Any, None)
        made = bench_ddp.Row(name, nothing, nothing, nothing, turns)
        made.sent_bytes, made.losses = [sent] * len(turns), [2.0]
        return made

    rows = [
        row("stock", [0.2, 0.4, 0.2], 400.0),
        row("hook", [0.1, 0.2, 0.1], 200.0),
        row("float16", [0.1, 0.1, 0.1], 201.0),
    ]
    text = bench_ddp.format_results(rows, 100)
    assert re.search(r"mpcompile, float16 wire +100 .* 0\.50 +1\.00 +2\.01 +2\.0000", text)


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_ddp.parse_arguments(["--interface", "lo", "--rows", "stock,hook,fp8"])
    assert "['fp8']; they are stock, hook" in capsys.readouterr().err


def test_half_the_bytes_take_half_the_time_on_a_slow_link() -> None:
    full = model_scaling.ring_seconds(2, 4e6, 1e9, 0.0)
    assert full == pytest.approx(0.032)
    assert model_scaling.ring_seconds(2, 2e6, 1e9, 0.0) == pytest.approx(full / 2)


def test_latency_makes_rings_slower_than_trees_on_many_ranks() -> None:
    ring = model_scaling.ring_seconds(4096, 1e6, 4e11, 1e-5)
    assert ring > 10 * model_scaling.tree_seconds(4096, 1e6, 4e11, 1e-5)


def test_sums_lose_more_on_more_ranks_and_in_bfloat16() -> None:
    few = model_scaling.sum_error(2, torch.float16, 1024)
    many = model_scaling.sum_error(64, torch.float16, 1024)
    assert 1e-5 < few < many < model_scaling.sum_error(64, torch.bfloat16, 1024) < 0.1


def test_model_prints_a_row_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    model_scaling.main(["--worlds", "2", "8", "--gbits", "1", "--params", "1e6"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^[28] .*$", printed, re.MULTILINE)) == 4
    assert math.isfinite(float(printed.split()[-1]))
