"""The host's C++ compiler and its flags, found as torch's own C++ builder finds them.

Private torch API, seen in 2.11 to 2.14: ``torch._inductor.cpp_builder.get_cpp_compiler``.
Importing it costs a fraction of a second, so it happens at the first build.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from dataclasses import dataclass

from mpcompile.errors import CodegenError

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-w",
)
"""No -ffast-math: NaN and Inf must come through, and products and sums round as in eager."""


@dataclass(frozen=True)
class HostCompiler:
    """``path`` runs it, ``version`` is the first line it prints about itself."""

    path: str
    version: str
    flags: tuple[str, ...]


def find_host_compiler() -> HostCompiler:
    """Return the compiler that torch would use: ``CXX``, or what it finds.

    Raises:
        CodegenError: none is installed.
    """
    return _probe(_torch_choice())


@functools.cache
def _probe(name: str) -> HostCompiler:
    found = shutil.which(name.split()[0]) if name else None
    if found is None:
        raise CodegenError(
            f"kernel: no C++ compiler was found (torch looked for {name or 'the usual ones'}). "
            "Install one or set CXX; until then updates run as eager PyTorch."
        )
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CodegenError(
            f"kernel: {found} --version failed ({error}). Set CXX to a C++ compiler that works."
        ) from error
    return HostCompiler(found, done.stdout.splitlines()[0], (*FLAGS, *_openmp(found)))


def _torch_choice() -> str:
    """Return the compiler torch would use, or nothing if it finds none."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return ""


def _openmp(compiler: str) -> tuple[str, ...]:
    """Return the OpenMP flags; the library resolves to the one torch has loaded already."""
    if sys.platform == "darwin":
        return ("-Xclang", "-fopenmp", "-lomp")
    return ("-fopenmp",)
