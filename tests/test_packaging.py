"""What a wheel holds, and that it works where the tree is not at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMPILE_BY_NAME = """
import sys
import torch

def step(x):
    return torch.nn.functional.relu(x @ x)

assert "mpcompile" in torch._dynamo.list_backends(exclude_tags=())
compiled = torch.compile(step, backend="mpcompile", options={"lowering": "eager"})
x = torch.eye(8)
assert torch.equal(compiled(x), x)
import mpcompile
print(mpcompile.__file__)
"""


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_tree(target: Path) -> Path:
    """Copy what a build needs, without the leftovers of earlier builds."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("mpcompile", "passes"):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def build(tree: Path, *options: str) -> Path:
    """Build offline with the installed setuptools and return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", *options, cwd=tree)
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def modules_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def modules_in_tree() -> set[str]:
    package = ROOT / "mpcompile"
    own = [path for path in package.rglob("*.py") if package / "passes" not in path.parents]
    names = {path.relative_to(ROOT).as_posix() for path in own}
    names |= {f"mpcompile/passes/{path.name}" for path in (ROOT / "passes").glob("*.py")}
    return names | {"mpcompile/py.typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and from it a wheel."""
    return build(copy_tree(tmp_path_factory.mktemp("tree")))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, without its dependencies, into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", str(target), str(wheel), cwd=target)
    return target


def test_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    assert modules_in(wheel) == modules_in_tree()


def test_sdist_holds_the_passes(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {f"passes/{path.name}" for path in (ROOT / "passes").glob("*.py")} <= names
    assert "LICENSE" in names


def test_wheel_is_the_same_without_the_link(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    (tree / "mpcompile" / "passes").unlink()
    assert modules_in(build(tree, "--wheel")) == modules_in_tree()


def test_installed_wheel_compiles_by_name_without_an_import(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", COMPILE_BY_NAME, cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(site)


def test_console_script_starts(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site)}
    out = run(sys.executable, str(site / "bin" / "mpcompile"), "passes", cwd=tmp_path, env=env)
    assert "fold-casts" in out
