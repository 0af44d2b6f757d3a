"""The benchmark of updates on CUDA: its table, and what it says where there is no card."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import bench_update, update_on_cuda
from benchmarks.update_on_cuda import CudaRow, format_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_speed_is_a_share_of_a_copy() -> None:
    row = CudaRow("mpcompile", lambda: None, 28 * 10**9, 1, [0.012, 0.01, 0.02])
    line = format_rows([row], 3e12).splitlines()[-1].split("  ")
    cells = [cell.strip() for cell in line if cell.strip()]
    assert cells == ["mpcompile", "12.000", "10.000 - 20.000", "2333", "78%", "1"]


def test_sets_hold_what_their_names_say() -> None:
    sets = {**bench_update.SHAPES, **update_on_cuda.BILLION}
    counts = {name: sum(torch.Size(s).numel() for s in shapes) for name, shapes in sets.items()}
    assert counts["1 B parameters"] == pytest.approx(1e9, rel=0.05)
    assert len(sets["2,000 tensors"]) == 2000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_update.py", "--device", "cuda"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_update.main()


@needs_gpu
@pytest.mark.gpu
def test_rows_run_on_a_card() -> None:
    args = argparse.Namespace(steps=2, warmup=3, inductor_tensors=0)
    rows = update_on_cuda.measure([(64, 64), (7,)], True, False, args)
    ours = next(row for row in rows if row.name == "mpcompile")
    assert ours.launches == 2
