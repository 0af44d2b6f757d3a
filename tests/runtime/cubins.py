"""Compile emitted CUDA text for several GPUs, which needs none, and look at what comes out."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from mpcompile.codegen.cuda_frame import THREADS
from mpcompile.codegen.nvrtc import Cubin, build_cubin, nvrtc_version

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REGISTERS = 65536
"""Of a multiprocessor: half of the threads that it can hold have room, or fewer."""
SPILLED_BY_OLDER = {"sm_100": 32}
"""Bytes that NVRTC 13.0, which torch brings, spills of the largest kernels; 13.5 spills nothing."""
_checked: set[str] = set()


def check_cubins(source: str) -> None:
    """Compile ``source`` for all architectures; with a new NVRTC no register may spill."""
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
    is_new = tuple(map(int, re.findall(r"\d+", nvrtc_version()))) >= (13, 5)
    spilled = 0 if is_new else SPILLED_BY_OLDER.get(arch, 0)
    for name, used in usage.items():
        assert used.spill_bytes <= spilled, f"{arch}, {name}: {used.spill_bytes} bytes spill"
        assert used.registers <= most, f"{arch}, {name}: {used.registers} registers"
