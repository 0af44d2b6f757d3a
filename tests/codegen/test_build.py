"""From source to a loaded function, and the cache in between."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from mpcompile.codegen import build, host_compiler
from mpcompile.codegen.build import build_library, private_dir
from mpcompile.codegen.host_compiler import find_host_compiler
from mpcompile.errors import CodegenError
from mpcompile.runtime import update as update_module
from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime.updating import parameters, relative_difference, set_grads

SOURCE = 'extern "C" long answer() { return 42; }\n'


def _answer(library: ctypes.CDLL) -> int:
    library.answer.restype = ctypes.c_long
    return int(library.answer())


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    first, second = build_library(SOURCE, tmp_path), build_library(SOURCE, tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert _answer(second.library) == 42
    assert (first.path.with_suffix(".cpp")).read_text() == SOURCE


def test_key_depends_on_the_source(tmp_path: Path) -> None:
    assert build_library(SOURCE, tmp_path).path != build_library(SOURCE + "\n", tmp_path).path


def test_key_depends_on_compiler_flags_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_host_compiler()
    key = build._key(SOURCE, compiler)
    other = type(compiler)(compiler.path, compiler.version, (*compiler.flags, "-g"))
    newer = type(compiler)(compiler.path, "g++ 99", compiler.flags)
    keys = {key, build._key(SOURCE, other), build._key(SOURCE, newer)}
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert len({*keys, build._key(SOURCE, compiler)}) == 4


@pytest.mark.parametrize("damage", ["truncated", "checksum lost", "other bytes"])
def test_corrupt_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    path = build_library(SOURCE, tmp_path).path
    content = path.read_bytes()
    path.unlink()  # this process has mapped it, and would die of a change in place
    if damage == "truncated":
        content = content[:100]
    elif damage == "checksum lost":
        path.with_suffix(".sha256").unlink()
    else:
        content = b"\0" * len(content)
    path.write_bytes(content)
    again = build_library(SOURCE, tmp_path)
    assert not again.cached
    assert build_library(SOURCE, tmp_path).cached


def test_cache_is_private(tmp_path: Path) -> None:
    folder = private_dir(tmp_path / "cache")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_dir(folder).stat().st_mode & 0o777 == 0o700


def test_folder_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CodegenError, match="belongs to user"):
        private_dir(tmp_path)


def test_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CodegenError, match="it is a link"):
        private_dir(tmp_path / "link")


def test_source_that_does_not_compile_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match="failed with status"):
        build_library("this is not C++", tmp_path)
    assert not list(tmp_path.glob("*.so"))


RACERS = """
import ctypes, os, sys
from pathlib import Path
from mpcompile.codegen.build import build_library

def race():
    os.close(release)
    os.read(start, 1)  # returns when the parent closes its end
    source = 'extern "C" long answer() { return 42; }'
    library = build_library(source, Path(sys.argv[1])).library
    library.answer.restype = ctypes.c_long
    return 0 if library.answer() == 42 else 1

start, release = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        os._exit(race())
    children.append(child)
os.close(release)
sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
"""


def test_eight_processes_race_for_one_entry(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-c", RACERS, str(tmp_path)]
    assert subprocess.run(command, env=env, timeout=240, check=False).returncode == 0
    assert len(list(tmp_path.glob("*.so"))) == 1
    assert not list(tmp_path.glob("build-*"))


def test_no_compiler_gives_one_warning_and_eager_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_compiler, "_torch_choice", lambda: "no-such-compiler")
    monkeypatch.setattr(update_module, "_warned", set())
    lists = [parameters() for _ in range(3)]
    optimizers = [torch.optim.AdamW(params) for params in lists]
    updates = [OptimizerUpdate(optimizer, cache_dir=tmp_path) for optimizer in optimizers[1:]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            set_grads(step, *lists)
            optimizers[0].step()
            for update in updates:
                update.run()
    found = [str(w.message) for w in caught if "runs as eager" in str(w.message)]
    assert len(found) == 1
    assert "no C++ compiler was found" in found[0]
    assert relative_difference(lists[0], lists[1]) == 0.0
    assert relative_difference(lists[0], lists[2]) == 0.0
