"""Compile emitted CUDA text for several GPUs, which needs none, and look at what comes out."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from mpcompile.codegen.cuda_frame import THREADS
from mpcompile.codegen.nvrtc import Cubin, build_cubin

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REGISTERS = 65536
"""Of a multiprocessor: half of the threads that it can hold have room, or fewer."""
_checked: set[str] = set()


def check_cubins(source: str) -> None:
    """Compile ``source`` for all architectures; no register may spill."""
    if source in _checked:
        return
    with ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda arch: build_cubin(source, arch), ARCHITECTURES))
    for arch, cubin in zip(ARCHITECTURES, cubins, strict=True):
        _check_usage(arch, cubin, REGISTERS // (THREADS * _resident(source)))
    _checked.add(source)


def _resident(source: str) -> int:
    found = re.search(r"RESIDENT = (\d+);", source)
    assert found is not None, "the source says how many blocks are to be resident"
    return int(found.group(1))


def _check_usage(arch: str, cubin: Cubin, most: int) -> None:
    usage = cubin.usage()
    assert usage, f"{arch}: no kernel in the log"
    for name, used in usage.items():
        assert used.spill_bytes == 0, f"{arch}, {name}: {used.spill_bytes} bytes spill"
        assert used.registers <= most, f"{arch}, {name}: {used.registers} registers"
