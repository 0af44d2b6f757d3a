"""A rank that dies, hangs or raises ends the others with a clear error, within the time-out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.faulty_rank import SECONDS
from tests.distributed.ranks import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ADVICE = "Another rank has died, hangs, or runs another step."


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("forward", "die"),
        ("forward", "raise"),
        ("backward", "die"),
        ("backward", "hang"),
        ("backward", "raise"),
        ("update", "hang"),
        ("update", "raise"),
        ("between", "die"),
        ("between", "hang"),
        ("offer", "die"),
        ("offer", "hang"),
        ("offer", "raise"),
        ("confirm", "die"),
        ("confirm", "hang"),
        ("confirm", "raise"),
        ("broadcast", "die"),
        ("broadcast", "hang"),
        ("send", "die"),
        ("send", "hang"),
        ("send", "stop"),
        ("send", "raise"),
        ("receive", "die"),
        ("receive", "hang"),
        ("receive", "stop"),
        ("receive", "raise"),
        ("compare_parameters", "die"),
        ("compare_parameters", "hang"),
        ("compare_parameters", "raise"),
    ],
)
def test_other_rank_ends_with_a_clear_error(phase: str, fault: str) -> None:
    command = [sys.executable, "-m", "tests.distributed.faulty_rank"]
    port = str(free_port())
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, phase, fault],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = json.loads(output.splitlines()[-1])
    assert ranks[0].returncode == 3
    assert found["seconds"] < SECONDS + 4
    assert ADVICE in found["text"]
    assert "init_process_group(timeout=...)" in found["text"]
