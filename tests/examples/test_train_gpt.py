"""A few steps of examples/train_gpt.py, tiny and without Inductor."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import train_gpt
from examples.train_gpt import Run, Settings
from mpcompile.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TINY = Settings(
    lowering="eager",
    steps=40,
    batch_size=4,
    context=32,
    layers=1,
    width=32,
    heads=2,
    eval_every=40,
    eval_batches=1,
    sample_bytes=8,
)
TINY_FLAGS = """--lowering eager --steps 6 --batch-size 4 --context 32 --layers 1 --width 32
    --heads 2 --eval-every 3 --eval-batches 1 --sample-bytes 8""".split()


@pytest.fixture(scope="module")
def corpus() -> tuple[Tensor, Tensor]:
    return train_gpt.load_corpus()


@pytest.fixture(scope="module")
def half(corpus: tuple[Tensor, Tensor]) -> Run:
    return train_gpt.train(corpus, TINY, "mpcompile", "bfloat16")


def test_corpus_is_python_source_and_the_same_at_every_call(corpus: tuple[Tensor, Tensor]) -> None:
    train, held_out = corpus
    again = train_gpt.load_corpus()

    assert len(train) > 5 * len(held_out) > 1_000_000
    assert b"def __init__(self" in bytes(train.numpy())
    assert all(torch.equal(a, b) for a, b in zip(corpus, again, strict=True))


def test_targets_are_the_next_bytes(corpus: tuple[Tensor, Tensor]) -> None:
    x, y = train_gpt.sample_batch(corpus[0], TINY, torch.Generator().manual_seed(1))

    assert x.shape == y.shape == (4, 32)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_bf16_run_learns_close_to_fp32_but_not_equal(
    corpus: tuple[Tensor, Tensor], half: Run
) -> None:
    full = train_gpt.train(corpus, TINY, "aot_eager", "float32")

    assert statistics.fmean(half.losses[-5:]) < statistics.fmean(half.losses[:5]) - 0.8
    assert half.losses == pytest.approx(full.losses, rel=2e-2)
    assert half.losses != full.losses
    assert half.peak_bytes < full.peak_bytes
    assert "assign-precision" in half.report


@pytest.mark.slow
def test_fp16_run_learns_as_fp32_does(corpus: tuple[Tensor, Tensor]) -> None:
    """The longer run of three seeds is in benchmarks/RESULTS.md."""
    half = train_gpt.train(corpus, TINY, "mpcompile", "float16")
    full = train_gpt.train(corpus, TINY, "eager", "float32")

    assert half.losses != full.losses
    ends = [statistics.fmean(run.losses[-5:]) for run in (half, full)]
    assert ends[0] == pytest.approx(ends[1], rel=2e-2)  # a step that overflows is lost


def test_equal_seeds_give_equal_losses(corpus: tuple[Tensor, Tensor], half: Run) -> None:
    again = train_gpt.train(corpus, TINY, "mpcompile", "bfloat16")

    assert again.losses == half.losses
    assert again.sample == half.sample


def test_main_prints_both_tables_and_draws_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_gpt.main([*TINY_FLAGS, "--output-dir", str(tmp_path / "new")]) == 0

    printed = capsys.readouterr().out
    assert re.search(r"mpcompile bfloat16 +aot_eager float32 +ratio", printed)
    assert re.search(r"validation loss, nats/byte +\d\.\d+ +\d\.\d+ +\d", printed)
    assert "Ops and matmul FLOPs by dtype" in printed
    assert "def " in printed
    curves = (tmp_path / "new" / "train_gpt.png").read_bytes()
    assert curves.startswith(b"\x89PNG")
    assert len(curves) > 10_000


def test_one_run_prints_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--backend", "eager", "--no-compare", "--output-dir", str(tmp_path)]
    assert train_gpt.main([*TINY_FLAGS, *flags]) == 0

    printed = capsys.readouterr().out
    assert "eager float32" in printed
    assert "ratio" not in printed
    assert "rewrote" not in printed


def test_table_counts_time_after_warmup_and_gives_ratios() -> None:
    settings = Settings(steps=4, batch_size=1, context=100)
    times = [3.0, 2.0, 0.5]  # two warm-up steps; the third was measured for memory
    runs = [
        Run("a", [2.0] * 4, {4: 2.0}, times, 2**20, "", ""),
        Run("b", [4.0] * 4, {4: 1.0}, [t * 2 for t in times], 2**21, "", ""),
    ]

    table = train_gpt.format_comparison(runs, settings)

    assert re.search(r"tokens/s.* 200 +100 +2\n", table)
    assert re.search(r"compile time.* 4 +8 +0\.5\n", table)
    assert re.search(r"peak memory.* 1 +2 +0\.5$", table)


def test_peak_counts_what_lives_at_the_same_time() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        first = torch.empty(2**20, dtype=torch.uint8)
        second = torch.empty(2**20, dtype=torch.uint8)
        del first, second
        return torch.empty(2**20, dtype=torch.uint8)

    _, peak = train_gpt.measure_peak_bytes(step, torch.ones(1), torch.ones(1))

    assert peak == 2 * 2**20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "inductro"], "inductro is not one of .*inductor"),
        (["--backend", "inductor", "--dtype", "bfloat16"], "leave --dtype out"),
        (["--heads", "5"], "--width 192 must be a multiple of --heads 5"),
        (["--steps", "2"], "at least 3"),
        (["--steps", "many"], "invalid int value"),
    ],
)
def test_wrong_flag_says_what_to_do(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main(flags)

    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main(["--device", "cuda"])

    assert "torch finds no GPU; use cpu" in capsys.readouterr().err


def test_unknown_dtype_is_named_with_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bf17.*bfloat16"):
        train_gpt.main([*TINY_FLAGS, "--dtype", "bf17", "--output-dir", str(tmp_path)])


def test_script_ends_without_traceback_on_a_wrong_dtype() -> None:
    script = ROOT / "examples" / "train_gpt.py"
    finished = subprocess.run(
        [sys.executable, str(script), *TINY_FLAGS, "--dtype", "bf17"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 1
    assert "bf17" in finished.stderr
    assert "Traceback" not in finished.stderr
