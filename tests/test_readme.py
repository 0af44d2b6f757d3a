"""README.md says what is true: its code runs, its tables are those of the program."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import mpcompile
from mpcompile.capture.session import session_of
from mpcompile.cli import main
from mpcompile.config import PLANNED_PASSES, option_rows
from mpcompile.pipeline import PIPELINE

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1] or "", match[2], match[3]) for match in FENCE.finditer(README)]
SEVERAL_RANKS = "several ranks"
USE = "opt.zero_grad(set_to_none=True)\n    return loss.detach()\n\n\ncompiled_step"


def readme_rows() -> dict[str, str]:
    """Return the rows of all tables by the name in their first cell."""
    return {line.split("`")[1]: line for line in README.splitlines() if line.startswith("| `")}


def block(marker: str) -> str:
    """Return the block behind ``<!-- marker -->``."""
    (text,) = (text for found, _, text in BLOCKS if found == marker)
    return text


def run_blocks(folder: Path, *containing: str) -> dict[str, Any]:
    """Run Python blocks as one script called train.py: all, or those that contain some text."""
    blocks = [
        text for found, language, text in BLOCKS if language == "python" and found != SEVERAL_RANKS
    ]
    if containing:
        blocks = [text for text in blocks if any(part in text for part in containing)]
    script = folder / "train.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    return runpy.run_path(str(script))


@pytest.fixture
def lowered_eagerly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Generate no kernels, and work in an empty folder; return it."""
    monkeypatch.setenv("MPCOMPILE_LOWERING", "eager")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def masked(line: str) -> str:
    """Replace numbers, which differ between versions and machines, and widths of columns."""
    return " ".join(re.sub(r"-{2,}", "--", re.sub(r"\d+(\.\d+)?", "#", line)).split())


def test_python_blocks_run_in_order(
    lowered_eagerly: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_blocks(lowered_eagerly)
    assert "Regions" in capsys.readouterr().out
    assert names["loss"].dtype.is_floating_point
    compiled, x, y = names["compiled_step"], names["x"], names["y"]
    compiled(x, y)  # takes the assignment that the last block but one wrote
    reasons = {d.reason for d in mpcompile.last_report(compiled).regions[0].decisions}
    assert "assignment read from file" in reasons
    assert names["step_by_hand"](x, y).isfinite()
    assert names["penalty"](x, x.mT).isfinite()
    assert names["angles"](x, x.mT).isfinite().all()


def test_block_for_several_ranks_runs_behind_the_first_step(lowered_eagerly: Path) -> None:
    names = run_blocks(lowered_eagerly, USE)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        exec(block(SEVERAL_RANKS), names)
    finally:
        dist.destroy_process_group()
    session = session_of(names["compiled_step"])
    assert session is not None
    assert session.config.wire_dtype is torch.float16


@pytest.mark.slow
def test_pasted_report_is_what_the_step_gives(tmp_path: Path) -> None:
    names = run_blocks(tmp_path, USE)
    report = str(mpcompile.last_report(names["compiled_step"]))
    real = {masked(line) for line in report.splitlines()}
    pasted = [masked(line) for line in block("output: last_report").splitlines() if line != "..."]
    assert [line for line in pasted if line not in real] == []


def test_pasted_diff_is_what_fold_casts_does(lowered_eagerly: Path) -> None:
    names = run_blocks(lowered_eagerly, USE)
    diff = mpcompile.last_report(names["compiled_step"]).regions[0].graph.diff("fold-casts")
    real = {masked(line) for line in diff.splitlines()}
    assert [line for line in block("output: diff").splitlines() if masked(line) not in real] == []


def test_overrides_of_the_readme_do_what_its_comments_say(lowered_eagerly: Path) -> None:
    names = run_blocks(lowered_eagerly, USE, "keep_fp32")
    decisions = mpcompile.last_report(names["compiled_step"]).regions[0].decisions
    products = {d.module: d.precision for d in decisions if d.op == "aten.addmm"}
    assert products == {"model.0": "half", "model.2": "fp32"}


def test_option_tables_are_those_of_the_program() -> None:
    rows = readme_rows()
    for row in option_rows():
        cells = (f"`{row.name}`", row.values, row.default, row.meaning)
        assert rows[row.name] == f"| {' | '.join(cells)} |"


def test_pass_table_says_what_off_means() -> None:
    order = [name for name in readme_rows() if "-" in name]
    assert order == [item.name for item in PIPELINE]
    for item in PIPELINE:
        row = readme_rows()[item.name]
        assert row.startswith(f"| `{item.name}` | {item.stage.value} | ")
        assert row.endswith(f" | {item.off} |")


@pytest.mark.parametrize("name", PLANNED_PASSES)
def test_planned_pass_is_named(name: str) -> None:
    assert f"`{name}`" in README
    assert name not in readme_rows()


def test_recompile_limit_is_the_default() -> None:
    (default,) = (row.default for row in option_rows() if row.name == "max_recompiles")
    assert f"`max_recompiles` times ({default})" in README


def test_each_command_is_one_line() -> None:
    setup = [text for marker, _, text in BLOCKS if "pip install" in text or "ci:" in marker]
    assert len(setup) == 2
    assert all(text.count("\n") == 1 for text in setup)


def test_test_command_pins_a_supported_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.11,<2.15" in project["dependencies"]
    assert "torch 2.11 to 2.14 are supported" in README
    (pin,) = re.findall(r"torch==(\S+)", block("ci: test command"))
    assert pin.startswith(("2.11.", "2.12.", "2.13.", "2.14."))


def test_ci_finds_the_test_command() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "marker='<!-- ci: test command -->'" in text
    assert README.splitlines().count("<!-- ci: test command -->") == 1


def test_linked_and_listed_files_exist() -> None:
    links = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    listing = next(text for _, _, text in BLOCKS if text.startswith("passes/"))
    listed = [line.split()[0] for line in listing.splitlines()]
    scripts = re.findall(r"python (\S+\.py)", README)
    assert [name for name in links + listed + scripts if not (ROOT / name).exists()] == []


def test_layout_lists_every_module() -> None:
    package = ROOT / "mpcompile"
    files = [f"mpcompile/{path.name}" for path in package.glob("[!_]*.py")]
    folders = [f"mpcompile/{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert [name for name in files + folders if name not in README] == ["mpcompile/passes/"]


def test_commands_that_are_named_exist() -> None:
    commands = set(re.findall(r"`mpcompile (\w+)`", README))
    assert commands == {"doctor", "passes"}
    for command in commands:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])


def test_contributing_lists_the_import_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^```\n(cli > .*?)^```", text, re.MULTILINE | re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert re.findall(r"\w+", listing) == re.findall(r"\w+", " ".join(layers))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_document_is_ascii_with_short_lines(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.isascii()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 100] == []
