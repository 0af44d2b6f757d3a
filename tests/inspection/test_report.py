"""Reports: the prints between passes, the tables, the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpcompile.backend import last_report
from mpcompile.config import BUILT_PASSES, Config
from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.report import GraphPrints, RegionReport, StepReport
from mpcompile.inspection.tables import format_bytes, format_flops
from mpcompile.pass_base import PassRecord, Stage
from tests.steps import batch, classifier_step, compile_step, training_region


def record(name: str, after: str) -> PassRecord:
    return PassRecord(name, Stage.ATEN, True, 1, 2000.0, after)


PRINTS = GraphPrints(
    before="%a: f32[2] = aten.relu(%x)",
    after="%a: bf16[2] = aten.gelu(%x)",
    passes=(
        record("first", "%a: f32[2] = aten.gelu(%x)"),
        record("second", "%a: bf16[2] = aten.gelu(%x)"),
    ),
)


@pytest.fixture
def compiled() -> Any:
    step = compile_step(classifier_step()[1], capture="regions")
    step(*batch())
    return step


# --- prints --------------------------------------------------------------------------------------


def test_print_after_a_pass() -> None:
    assert PRINTS.after_pass("first") == "%a: f32[2] = aten.gelu(%x)"


def test_diff_of_one_pass_is_against_the_one_before() -> None:
    assert PRINTS.diff("first").splitlines()[0] == "ops: aten.gelu 0 -> 1, aten.relu 1 -> 0"
    assert PRINTS.diff("second").splitlines()[0] == "ops: same ops, other types"
    assert PRINTS.diff().splitlines()[-1] == "+%a: bf16[2] = aten.gelu(%x)"


@pytest.mark.parametrize("method", ["after_pass", "diff"])
def test_unknown_pass_is_an_error_that_lists_those_that_ran(method: str) -> None:
    with pytest.raises(KeyError, match=r"no pass 'third' ran on this graph; these did: first, sec"):
        getattr(PRINTS, method)("third")


def test_pass_of_another_stage_is_an_error(compiled: Any) -> None:
    ran = "these did: assign-precision, insert-casts, scale-loss, fold-casts"
    with pytest.raises(KeyError, match=ran):
        training_region(compiled).graph.after_pass("cast-composites")
    assert training_region(compiled).dynamo_graph.diff("cast-composites") == ""


def test_prints_follow_the_passes(compiled: Any) -> None:
    prints = training_region(compiled).graph
    assert prints.diff("assign-precision") == ""
    assert "aten._to_copy 0 -> " in prints.diff("insert-casts").splitlines()[0]
    assert prints.after_pass("fold-casts") == prints.after
    assert prints.before != prints.after


# --- tables --------------------------------------------------------------------------------------


def test_tables_contain_what_they_claim(compiled: Any) -> None:
    text = str(last_report(compiled))
    region = training_region(compiled)
    assert text.splitlines()[0] == "mpcompile: dtype bfloat16, table painted, lowering eager"
    for title in (
        "Regions",
        "What broke the graph",
        "Passes",
        "Ops and matmul FLOPs by dtype",
        "Saved for backward",
        "Casts",
    ):
        assert f"\n{title}\n" in text
    (row,) = (line.split() for line in text.splitlines() if "forward+backward" in line)
    assert row[2:4] == [str(len(region.aten_after.splitlines())), str(len(region.casts))]
    (row,) = (line.split() for line in text.splitlines() if line.startswith("insert-casts"))
    rewrites = sum(
        r.rewrites
        for each in last_report(compiled).regions
        for r in each.pass_records
        if r.name == "insert-casts"
    )
    assert row[1:4] == ["aten", "on", str(rewrites)]


def test_disabled_pass_is_shown_as_off() -> None:
    step = compile_step(classifier_step()[1], disable=["fold-casts"])
    step(*batch())
    rows = [line.split() for line in str(last_report(step)).splitlines()]
    (row,) = (row for row in rows if row and row[0] == "fold-casts")
    assert row[1:4] == ["aten", "off", "0"]


def test_every_cast_has_a_reason_and_the_users_line(compiled: Any) -> None:
    casts = training_region(compiled).casts
    assert casts
    assert all(cast.reason for cast in casts)
    assert {cast.line.partition(":")[0] for cast in casts} == {"steps.py"}
    assert {cast.dtypes for cast in casts} == {"f32 -> bf16", "bf16 -> f32"}


def test_every_decision_has_a_reason_and_a_module(compiled: Any) -> None:
    decisions = training_region(compiled).decisions
    assert all(decision.reason for decision in decisions)
    assert {d.module for d in decisions if d.op == "aten.addmm"} == {
        "model.read_in",
        "model.readout",
    }


def test_update_regions_have_no_casts() -> None:
    step = compile_step(classifier_step()[1], disable=["fuse-updates"], capture="regions")
    step(*batch())
    regions = [r for r in last_report(step).regions if r.kind is GraphKind.UPDATE]
    assert regions
    assert not any(region.casts or region.decisions for region in regions)


def test_long_cast_table_is_cut_with_a_note() -> None:
    step = compile_step(
        torch.nn.Sequential(*(torch.nn.Linear(width, width + 1) for width in range(2, 16)))
    )
    step(torch.ones(2, 2)).sum().backward()
    assert "more rows: report.regions[i].casts has every cast" in str(last_report(step))


def test_report_of_nothing_says_so() -> None:
    assert str(StepReport(Config())) == "mpcompile: nothing was compiled yet. Call the step once."


def test_breaks_are_kept_once() -> None:
    report = StepReport(Config())
    report.add_break("a", "x.py:1")
    report.add_break("a", "x.py:1")
    assert report.breaks == [("a", "x.py:1")]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB")]
)
def test_bytes_are_spelled_in_powers_of_1024(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 FLOP"), (1500, "1.5 kFLOP"), (2 * 10**12, "2 TFLOP")]
)
def test_flops_are_spelled_in_powers_of_1000(count: int, text: str) -> None:
    assert format_flops(count) == text


# --- files ---------------------------------------------------------------------------------------


def test_report_dir_gets_one_file_a_pass(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "graphs"
    step = compile_step(classifier_step()[1], report_dir=str(folder))
    step(*batch())
    region: RegionReport = training_region(step)
    names = sorted(path.name for path in folder.glob(f"region{region.index}-*"))
    assert names == [
        f"region{region.index}-aten-0-before.txt",
        f"region{region.index}-aten-1-assign-precision.txt",
        f"region{region.index}-aten-2-insert-casts.txt",
        f"region{region.index}-aten-3-scale-loss.txt",
        f"region{region.index}-aten-4-fold-casts.txt",
        f"region{region.index}-aten-5-bucket-allreduce.txt",
        f"region{region.index}-dynamo-0-before.txt",
        f"region{region.index}-dynamo-1-cast-composites.txt",
    ]
    last = folder / names[4]
    assert last.read_text() == region.graph.after + "\n"


def test_assignment_is_json_with_region_node_and_precision(compiled: Any, tmp_path: Path) -> None:
    path = tmp_path / "assignment.json"
    last_report(compiled).save_assignment(path)
    entries = json.loads(path.read_text())
    assert entries == last_report(compiled).assignment()
    assert entries[0].keys() == {"region", "node", "op", "precision", "reason"}
    assert {entry["precision"] for entry in entries} <= {"half", "fp32", "fp32->half"}


def test_every_pass_is_recorded_with_its_time(compiled: Any) -> None:
    records = training_region(compiled).pass_records
    assert [r.name for r in records] == list(BUILT_PASSES)
    assert all(r.time_us > 0 for r in records)
