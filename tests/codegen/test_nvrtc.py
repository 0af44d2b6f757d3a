"""NVRTC without a GPU: cubins, their cache, and what is said where it is missing."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from mpcompile.codegen.cuda import emit_cuda
from mpcompile.codegen.nvrtc import Cubin, Usage, build_cubin, nvrtc_version
from mpcompile.errors import CodegenError
from tests.codegen.test_cuda import _cuda_like

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cubin_tells_registers_and_spills(arch: str, tmp_path: Path) -> None:
    usage = build_cubin(emit_cuda(_cuda_like()), arch, tmp_path).usage()
    assert set(usage) == {"phase_0", "phase_1"}
    assert all(used.spill_bytes == 0 and 8 < used.registers <= 64 for used in usage.values())


def test_spills_and_registers_are_read_from_the_log(tmp_path: Path) -> None:
    part = (
        "Compiling entry function '{}' for 'sm_90'\n 8 bytes stack frame, {} bytes spill stores, "
        "{} bytes spill loads\nptxas info    : Used {} registers, used 1 barriers\n"
    )
    log = part.format("phase_0", 12, 16, 40) + part.format("phase_1", 0, 0, 32)
    usage = Cubin(b"", log, tmp_path, cached=False).usage()
    assert usage == {"phase_0": Usage(40, 28), "phase_1": Usage(32, 0)}


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    source = emit_cuda(_cuda_like())
    first, second = (build_cubin(source, "sm_90", tmp_path) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert (first.code, first.log) == (second.code, second.log)
    assert not build_cubin(source, "sm_80", tmp_path).cached
    first.path.write_bytes(b"broken")
    assert build_cubin(source, "sm_90", tmp_path).code == second.code


def test_accesses_are_wide_and_products_are_not_fused_into_sums() -> None:
    text = ptx_of(emit_cuda(_cuda_like()))
    assert re.search(r"ld(\.\w+)*\.v4", text)
    assert re.search(r"st(\.\w+)*\.v4", text)
    assert "mul.f32" in text or "mul.rn.f32" in text
    assert "fma.rn.f32" not in text


def ptx_of(source: str) -> str:
    """Return the PTX of ``source``; cuda.core asks the driver first, so this goes to NVRTC."""
    from cuda.bindings import nvrtc as library

    def check(result: Any) -> Any:
        status, *rest = result
        assert int(status) == 0, status
        return rest[0] if rest else None

    program = check(library.nvrtcCreateProgram(source.encode(), b"kernel", 0, [], []))
    options = [b"-arch=compute_90", b"-std=c++17", b"-fmad=false", b"-default-device"]
    check(library.nvrtcCompileProgram(program, len(options), options))
    text = b" " * int(check(library.nvrtcGetPTXSize(program)))
    check(library.nvrtcGetPTX(program, text))
    return str(text, "ascii")


def test_text_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match=r"(?s)NVRTC failed for sm_90.*nonsense"):
        build_cubin("nonsense", "sm_90", tmp_path)


def test_unknown_gpu_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match="newer than this NVRTC"):
        build_cubin(emit_cuda(_cuda_like()), "sm_999", tmp_path)


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings"])
def test_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(CodegenError, match=rf"{missing} is not installed.*mpcompile\[cuda\]"):
        nvrtc_version()


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as library

    def refuse() -> None:
        raise RuntimeError("libnvrtc.so is not found")

    monkeypatch.setattr(library, "nvrtcVersion", refuse)
    with pytest.raises(CodegenError, match=r"NVRTC.*not found.*mpcompile\[cuda\]"):
        nvrtc_version()
