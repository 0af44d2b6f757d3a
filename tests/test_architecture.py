"""The shape of the tree: import directions, one test and one README row a pass, a light import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from mpcompile.config import BUILT_PASSES, option_rows

ROOT = Path(__file__).resolve().parent.parent
PASS_FILES = sorted(path for path in (ROOT / "passes").glob("*.py") if path.stem != "__init__")
BUILT_OPTIONS = [row.name for row in option_rows() if row.default != "not yet"]
SOURCES = sorted(
    path
    for folder in ("mpcompile", "passes")
    for path in (ROOT / folder).rglob("*.py")
    if "mpcompile/passes" not in path.as_posix()
)

IMPORT_PROBE = """
import sys
import torch

loaded = set(sys.modules)
started = []
watched = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn")
sys.addaudithook(lambda event, _: started.append(event) if event in watched else None)

import mpcompile

assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not started, f"a process was started: {started}"
heavy = ("torch._dynamo", "torch._inductor", "triton")
new = sorted(name for name in set(sys.modules) - loaded if name.startswith(heavy))
assert not new, f"loaded too early: {new[:5]}"
"""


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def readme_rows() -> dict[str, str]:
    """Return the table rows of the README by the name in their first cell."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def test_import_layers_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 kept, 0 broken" in result.stdout


def test_import_contracts_see_the_passes_through_the_link() -> None:
    modules = grimp.build_graph("mpcompile", cache_dir=None).modules
    assert {f"mpcompile.passes.{path.stem}" for path in PASS_FILES} <= modules


def test_pass_files_are_named_after_the_built_passes() -> None:
    assert {path.stem.replace("_", "-") for path in PASS_FILES} == set(BUILT_PASSES)


@pytest.mark.parametrize("path", PASS_FILES, ids=lambda path: path.stem)
def test_each_pass_has_a_test_file_and_a_readme_row(path: Path) -> None:
    assert (ROOT / "tests" / "passes" / f"test_{path.stem}.py").is_file()
    assert path.stem.replace("_", "-") in readme_rows()


@pytest.mark.parametrize("name", BUILT_OPTIONS)
def test_each_built_option_has_a_readme_row(name: str) -> None:
    assert name in readme_rows()


def test_top_level_passes_folder_cannot_be_imported_by_that_name() -> None:
    result = run_python("import passes", ROOT)
    assert result.returncode != 0
    assert "ImportError: import 'mpcompile.passes'" in result.stderr


def test_import_initialises_no_cuda_loads_no_compiler_and_starts_nothing() -> None:
    result = run_python(IMPORT_PROBE, ROOT)
    assert result.returncode == 0, result.stderr


def test_public_names_stay_functions_after_use() -> None:
    code = """
import mpcompile

for name in mpcompile.__all__:
    for _ in range(2):
        assert type(getattr(mpcompile, name)).__name__ == "function", name
"""
    result = run_python(code, ROOT)
    assert result.returncode == 0, result.stderr


def test_environment_is_read_in_config_only() -> None:
    readers = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers <= {"mpcompile/config.py"}


def test_sources_are_ascii() -> None:
    not_ascii = [
        path.relative_to(ROOT).as_posix()
        for folder in ("mpcompile", "passes", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if not path.read_bytes().isascii()
    ]
    assert not_ascii == []
