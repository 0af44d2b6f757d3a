"""From source to a loaded function: the host compiler, and the cache of what it built.

The key of an entry is the source, the compiler's version, the flags and the machine. The cache
belongs to one user (0700, ownership checked) because its files are executed. An entry is written
under a private name and moved into place, so racing processes see all of it or nothing; an entry
whose checksum fails is built again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mpcompile.codegen.host_compiler import HostCompiler, find_host_compiler
from mpcompile.config import default_cache_dir
from mpcompile.errors import CodegenError

COMPILE_TIMEOUT_S = 300


@dataclass(frozen=True)
class Built:
    """A loaded library. ``path`` is its cache entry; ``cached`` says that nothing was compiled."""

    library: ctypes.CDLL
    path: Path
    cached: bool


def private_dir(path: Path) -> Path:
    """Create ``path`` with mode 0700, or check that it is ours alone.

    Raises:
        CodegenError: it is a link, belongs to someone else or others can write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    uid = os.getuid() if hasattr(os, "getuid") else info.st_uid
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid:
        raise CodegenError(
            f"kernel cache {path}: it is a link or belongs to user {info.st_uid}, and code that "
            "someone else can replace is not loaded. Remove it or choose another cache_dir."
        )
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path


def build_library(source: str, cache_dir: Path | None = None) -> Built:
    """Compile ``source`` as C++, or take it from the cache, and load it.

    Raises:
        CodegenError: there is no compiler, it failed, or the cache is not private.
    """
    compiler = find_host_compiler()
    folder = private_dir(cache_dir or default_cache_dir())
    key = _key(source, compiler)
    path = folder / f"{key}.so"
    if is_intact(path):
        return Built(_load(path), path, cached=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        built = _compile(source, compiler, Path(scratch))
        digest = Path(scratch) / "digest"
        digest.write_text(_digest(built))
        os.replace(built, path)
        os.replace(digest, path.with_suffix(".sha256"))
        (Path(scratch) / "kernel.cpp").replace(path.with_suffix(".cpp"))
    return Built(_load(path), path, cached=False)


def _key(source: str, compiler: HostCompiler) -> str:
    parts = (source, compiler.version, *compiler.flags, platform.machine(), cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


@functools.cache
def cpu_features() -> str:
    """Return what ``-march=native`` depends on; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "".join(sorted({line for line in text.splitlines() if line.startswith(wanted)}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_intact(path: Path) -> bool:
    """Whether ``path`` is complete; a library and a checksum from two builds do not match."""
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except OSError:
        return False


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CodegenError(
            f"kernel {path}: it was built but cannot be loaded ({error}). "
            "Remove it, and check that the compiler builds for this machine."
        ) from error


def _compile(source: str, compiler: HostCompiler, scratch: Path) -> Path:
    """Run the compiler in ``scratch``; return the library."""
    text, library = scratch / "kernel.cpp", scratch / "kernel.so"
    text.write_text(source)
    command = [compiler.path, *compiler.flags, str(text), "-o", str(library)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CodegenError(
            f"kernel: {compiler.path} did not run ({error}). Set CXX to a C++ compiler that works."
        ) from error
    if done.returncode != 0:
        raise CodegenError(
            f"kernel: {compiler.path} failed with status {done.returncode}:\n"
            f"{done.stderr[-2000:]}\nThat is a bug of mpcompile unless CXX is an unusual compiler."
        )
    return library
