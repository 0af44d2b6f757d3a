"""From CUDA source to a cubin: NVRTC, which needs no GPU and no header, and the cache of cubins.

NVRTC comes through ``cuda.core`` (extra ``cuda``), which finds the library of the NVRTC wheel or of
an installed toolkit. Products and sums are not contracted, so they round as the expressions say.
Private API, seen in cuda.core 1.2: ``cuda.core._utils.cuda_utils.CUDAError``.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpcompile.codegen.build import is_intact, private_dir
from mpcompile.config import default_cache_dir
from mpcompile.errors import CodegenError

INSTALL = "pip install 'mpcompile[cuda]'"
_importing = threading.Lock()
"""Two threads that import cuda.core for the first time find half of it (cuda.core 1.2)."""
OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "fma": False,
    "device_as_default_execution_space": True,  # NVRTC 13.0 takes generic lambdas for the host's
    "ptxas_options": ["-v"],
}


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of a multiprocessor, as ptxas reports it."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture. ``cached`` says that nothing was compiled."""

    code: bytes
    log: str
    path: Path
    cached: bool

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each kernel by name."""
        found = {}
        for part in self.log.split("Compiling entry function '")[1:]:
            spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
            (registers,) = re.findall(r"Used (\d+) registers", part)
            found[part.partition("'")[0]] = Usage(int(registers), sum(map(int, spills)))
        return found


def nvrtc_version() -> str:
    """Return the version of NVRTC.

    Raises:
        CodegenError: ``cuda.core`` or NVRTC is missing; the message names the extra.
    """
    try:
        with _importing:
            from cuda.bindings import nvrtc
            from cuda.core import Program  # noqa: F401 - asked for here, so one error names it
    except ImportError as error:
        raise CodegenError(
            f"kernel: {error.name or 'cuda.core'} is not installed, which compiles update kernels "
            f"for CUDA. {INSTALL}"
        ) from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CodegenError(
            f"kernel: NVRTC, which compiles update kernels for CUDA, was not found "
            f"({str(error).splitlines()[0]}). {INSTALL}"
        ) from error
    return f"NVRTC {major}.{minor}"


def build_cubin(source: str, arch: str, cache_dir: Path | None = None) -> Cubin:
    """Compile ``source`` for ``arch`` (sm_90, say), or take it from the cache.

    Raises:
        CodegenError: NVRTC is missing, it failed, or the cache is not private.
    """
    version = nvrtc_version()
    folder = private_dir(cache_dir or default_cache_dir())
    key = "\0".join((source, arch, version, repr(OPTIONS)))
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.cubin"
    log = path.with_suffix(".log")
    if is_intact(path) and log.exists():
        return Cubin(path.read_bytes(), log.read_text(), path, cached=True)
    code, text = _compile(source, arch)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        made = Path(scratch)
        (made / "log").write_text(text)
        (made / "code").write_bytes(code)
        (made / "digest").write_text(hashlib.sha256(code).hexdigest())
        (made / "source").write_text(source)
        os.replace(made / "log", log)
        os.replace(made / "code", path)
        os.replace(made / "digest", path.with_suffix(".sha256"))
        os.replace(made / "source", path.with_suffix(".cu"))
    return Cubin(code, text, path, cached=False)


def _compile(source: str, arch: str) -> tuple[bytes, str]:
    """Run NVRTC; return the machine code and what ptxas says of it."""
    from cuda.core import Program, ProgramOptions
    from cuda.core._utils.cuda_utils import CUDAError

    log = io.StringIO()
    try:
        program = Program(source, "c++", ProgramOptions(arch=arch, **OPTIONS))
        code = program.compile("cubin", logs=log).code
    except CUDAError as error:
        raise CodegenError(
            f"kernel: NVRTC failed for {arch}:\n{str(error)[-2000:]}\n"
            "A GPU newer than this NVRTC needs a newer one; else that is a bug of mpcompile."
        ) from error
    return bytes(code), log.getvalue()
