"""A run that is killed and resumed from its last checkpoint goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
import torch
import torch.nn.functional as F
import mpcompile

torch.set_num_threads(1)
path, steps, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)

def step(x, labels):
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()

compiled = torch.compile(
    step,
    backend="mpcompile",
    options={"dtype": "float16", "lowering": "eager", "growth_interval": 3},
)
first = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    mpcompile.load_state_dict(compiled, saved["step"])
    first = saved["next"]
for index in range(first, steps):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(12, 8, generator=generator) * (1e5 if index in (2, 7) else 1.0)
    loss = compiled(x, torch.randint(4, (12,), generator=generator))
    scale = mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"]
    print(index, loss.item().hex(), scale, flush=True)
    states = {"model": model.state_dict(), "opt": opt.state_dict()}
    states |= {"step": mpcompile.state_dict(compiled), "next": index + 1}
    torch.save(states, path + ".new")
    os.replace(path + ".new", path)
    if index == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(path: Path, kill_at: int = -1) -> tuple[int, list[str]]:
    """Run the program for ten steps; return how it ended and what it printed."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), "10", str(kill_at)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    return found.returncode, found.stdout.splitlines()


@pytest.mark.slow
def test_killed_float16_run_resumes_to_the_last_digit(tmp_path: Path) -> None:
    code, whole = run(tmp_path / "whole")
    assert (code, len(whole)) == (0, 10)
    code, before = run(tmp_path / "killed", kill_at=4)
    assert code == -signal.SIGKILL
    code, after = run(tmp_path / "killed")
    assert code == 0
    assert before + after == whole
    scales = [float(line.split()[2]) for line in whole]
    assert scales[2] < scales[1]  # it fell
    assert max(scales[3:7]) > scales[2]  # and grew again before the second fall
