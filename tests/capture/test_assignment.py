"""Assignments: written by a report, edited, read back; mistakes are listed together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpcompile.backend import last_report
from mpcompile.capture.assignment import read_assignment
from mpcompile.config import Config
from mpcompile.errors import ConfigError
from tests.steps import batch, classifier_step, compile_step, training_region


def assigned(document: object) -> Any:
    return read_assignment(Config.from_options({"assignment": document}, environ={}))


def test_no_assignment_assigns_nothing() -> None:
    assert read_assignment(Config()) == {}


def test_entries_are_sorted_by_region() -> None:
    entry = {"node": "mm", "precision": "half", "op": "aten.mm", "reason": "x"}
    assert assigned(
        [{"region": 0, **entry}, {"region": 2, **entry, "precision": "fp32->half"}]
    ) == {
        0: {"mm": "half"},
        2: {"mm": "fp32->half"},
    }


def test_all_malformed_entries_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        assigned(
            [
                "mm",
                {"region": "0", "node": "mm", "precision": "half"},
                {"region": 0, "node": "mm", "precision": "half"},
                {"region": 0, "node": "mm", "precision": "bf16"},
            ]
        )
    assert str(caught.value).splitlines() == [
        "assignment options:",
        "  - entry 0: 'mm' is not an object with region, node and precision",
        "  - entry 1: region must be a number and node a name, found "
        "{'node': 'mm', 'precision': 'half', 'region': '0'}",
        "  - entry 3: precision 'bf16' is none of fp32, half, fp32->half",
    ]


def test_document_that_is_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds a dict, not a list.*save_assignment\(path\)"):
        assigned({"mm": "half"})


def test_mistakes_surface_at_torch_compile() -> None:
    with pytest.raises(ConfigError, match="entry 0: precision 'x'"):
        compile_step(
            classifier_step()[1], assignment=[{"region": 0, "node": "a", "precision": "x"}]
        )


def test_saved_assignment_read_back_gives_the_same_graphs(tmp_path: Path) -> None:
    compiled = compile_step(classifier_step()[1])
    loss = compiled(*batch())
    path = tmp_path / "assignment.json"
    last_report(compiled).save_assignment(path)
    again = compile_step(classifier_step()[1], assignment=str(path))
    assert again(*batch()) == loss
    assert training_region(again).aten_after == training_region(compiled).aten_after
    assert {d.reason for d in training_region(again).decisions} == {"assignment read from file"}


def test_edited_entry_is_followed(tmp_path: Path) -> None:
    compiled = compile_step(classifier_step()[1])
    compiled(*batch())
    entries = last_report(compiled).assignment()
    for entry in entries:
        entry["precision"] = "fp32"
    path = tmp_path / "assignment.json"
    path.write_text(json.dumps(entries))
    again = compile_step(classifier_step()[1], assignment=path)
    again(*batch())
    assert training_region(again).casts == []
