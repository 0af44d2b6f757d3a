"""examples/train_ddp.py on two ranks: it learns, and a resumed run goes on as if never stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_ddp
from tests.distributed.ranks import free_port

ROOT = Path(__file__).parents[2]


def run(folder: Path, *flags: str) -> str:
    """Start two ranks and return what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "examples/train_ddp.py"]
    command += ["--device", "cpu", "--lowering", "eager"]
    command += ["--checkpoint", str(folder / "checkpoint.pt"), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_run_in_bfloat16_learns_and_tells_what_it_sent(tmp_path: Path) -> None:
    text = run(tmp_path, "--epochs", "4", "--wire-dtype", "bfloat16")
    accuracy = float(text.rpartition("epoch 4: ")[2].splitlines()[0].split()[-1].removesuffix("%"))
    assert accuracy > 85
    assert "gradients went as bfloat16: 0.58 MiB a step and rank, 2.00 bytes" in text


@pytest.mark.distributed
@pytest.mark.slow
def test_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    flags = ["--wire-dtype", "bfloat16", "--dtype", "float16", "--error-feedback"]
    straight = run(tmp_path / "straight", "--epochs", "3", *flags)
    run(tmp_path / "halves", "--epochs", "1", *flags)
    resumed = run(tmp_path / "halves", "--epochs", "3", "--resume", *flags)
    last = [re.findall(r"^epoch 3: .*$", text, re.MULTILINE) for text in (straight, resumed)]
    assert last[0] == last[1] != []


@pytest.mark.parametrize(
    ("flags", "rank", "message"),
    [([], None, "start it with torchrun"), (["--resume", "--checkpoint", "none"], "0", "no none")],
)
def test_wrong_start_says_what_to_do(
    flags: list[str],
    rank: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(*("RANK", rank) if rank else ("UNUSED", ""))
    with pytest.raises(SystemExit, match="2"):
        train_ddp.parse_arguments(flags)
    assert message in capsys.readouterr().err
