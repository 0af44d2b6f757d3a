"""benchmarks/bench_step.py: its rows, its figures, and one tiny run without a compiler."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_step, compile_time
from benchmarks.rows import ROWS, Row, build_program
from examples.train_gpt import Settings, load_corpus

TINY = Settings(batch_size=2, context=16, layers=1, width=16, heads=2)
TINY_FLAGS = """--batch-size 2 --context 16 --layers 1 --width 16 --heads 2 --steps 2 --warmup 1
    --repeats 3""".split()


def test_eager_row_is_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    flags = ["--rows", "eager-fp32", "--no-compile-times", "--json", str(target)]
    assert bench_step.main([*TINY_FLAGS, *flags]) == 0

    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    assert re.search(r"eager fp32 +\d+\.\d \(\d+\.\d-\d+\.\d\)", printed)
    assert "after 8 steps" in printed
    results = json.loads(target.read_text())
    assert len(results["step_s"]["eager-fp32"]) == 3
    assert results["peak_bytes"]["eager-fp32"] > 0


def test_every_row_starts_equal_and_sees_equal_batches() -> None:
    text = load_corpus()[0]
    eager = Row("eager"), Row("autocast", autocast=True)
    first, second = (build_program(row, TINY, text) for row in eager)

    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(next(first.batches)[0], next(second.batches)[0])


def test_autocast_row_is_close_to_fp32_but_not_equal() -> None:
    text = load_corpus()[0]
    losses = []
    for row in (Row("eager"), Row("autocast", autocast=True)):
        program = build_program(row, TINY, text)
        losses.append([program.step(*next(program.batches)).item() for _ in range(3)])

    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]


def test_spread_is_median_and_quartiles() -> None:
    assert bench_step.format_spread([4.0, 1.0, 2.0, 3.0, 5.0]) == "3.00 (2.00-4.00)"
    assert bench_step.format_spread([0.5], scale=1e3, digits=1) == "500.0"


def test_ratio_is_taken_within_turns() -> None:
    assert bench_step.format_ratio([1.0, 20.0, 3.0], [1.0, 10.0, 3.0]) == "1.00 (1.00-1.50)"
    assert bench_step.format_ratio([1.0], None) == ""


def test_compile_times_are_set_beside_the_peer() -> None:
    columns = ["step cold", "step warm", "forward_backward cold", "forward_backward warm"]
    found = {
        "inductor-autocast": {column: [10.0] for column in columns},
        "mpcompile": {column: [12.0] for column in columns},
    }

    table = bench_step.format_compile_times(found)

    assert re.search(r"mpcompile bf16, whole step( +12\.0 +1\.20){4}", table)


def test_work_is_counted_beside_the_clock() -> None:
    def work(x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor(sum(range(3_000_000)))

    found = compile_time._time_call(work, torch.ones(1), torch.ones(1))
    assert 0 < found.cpu < 1.2 * found.wall + 0.1


def test_compile_time_of_eager_is_next_to_nothing() -> None:
    assert abs(compile_time.measure_row("eager-fp32", "step", TINY).cpu) < 1


def test_failing_child_shows_its_error() -> None:
    broken = Settings(width=10, heads=3)
    with pytest.raises(RuntimeError, match="compile_time eager-fp32 step"):
        compile_time.measure_cold_and_warm("eager-fp32", "step", broken)


def test_rows_are_those_that_the_table_promises() -> None:
    ours = ["mpcompile", "mpcompile-zero-first", "mpcompile-drop", "mpcompile-regions"]
    stock = ["eager-fp32", "inductor-fp32", "inductor-autocast"]
    assert list(ROWS) == [*stock, *ours]
