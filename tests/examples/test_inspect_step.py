"""examples/inspect_step.py: what it prints is what the passes did."""

from __future__ import annotations

import re

import pytest
import torch

import mpcompile
from examples import inspect_step


def test_main_shows_report_reasons_passes_options_and_mistakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect_step.main([]) == 0

    printed = capsys.readouterr().out
    sections = re.split(r"^\d\. ", printed, flags=re.MULTILINE)[1:]
    report, reasons, passes, options, mistakes = sections
    assert re.search(r"^captured: whole, region 0 > AdamW update$", report, re.MULTILINE)
    assert re.search(r"exp +aten\.exp +fp32 +inspect_step\.py:\d+ +reads \.float\(\)", reasons)
    assert re.search(r"^ops: aten\._to_copy \d+ -> \d+$", passes, flags=re.MULTILINE)
    assert "'fold-cast' is no pass; did you mean 'fold-casts'" in mistakes
    assert "'bf17' is no dtype" in mistakes
    assert "disable=['assign-precision']" in options


def test_options_change_the_graph_as_the_table_says() -> None:
    step = inspect_step.build_step()
    x, labels = torch.randn(32, 64), torch.randint(16, (32,))
    casts, shares = [], []
    for options in ({}, {"disable": ["assign-precision"]}, {"keep_fp32": ["model.readout"]}):
        report = mpcompile.explain(step, x, labels, options=options)
        region = inspect_step.training_region(report)
        casts.append(len(region.casts))
        shares.append(region.ops_after.half_share())

    assert casts[1] == 0 < casts[2] < casts[0]
    assert shares[0] == 1.0
    assert shares[1] == 0.0
    assert shares[2] == pytest.approx(0.91, abs=0.01)


def test_explaining_does_not_train() -> None:
    torch.manual_seed(3)
    explained = inspect_step.build_step()
    torch.manual_seed(3)
    untouched = inspect_step.build_step()
    x, labels = torch.randn(32, 64), torch.randint(16, (32,))
    mpcompile.explain(explained, x, labels)

    assert torch.equal(explained(x, labels), untouched(x, labels))
    assert torch.equal(explained(x, labels), untouched(x, labels))
