"""A CUDA device as torch and ``cuda.core`` drive it; the only file that touches the driver.

Launches go to torch's current stream of the device, in the context that torch made. Private API,
seen in cuda.core 1.2: ``cuda.core._utils.cuda_utils.CUDAError``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpcompile.codegen.cuda_frame import THREADS
from mpcompile.codegen.nvrtc import INSTALL, build_cubin, nvrtc_version
from mpcompile.errors import CodegenError


@dataclass
class CudaModule:
    """A cubin in the driver, and its kernels as they are first asked for."""

    device: torch.device
    code: Any
    cached: bool

    def __post_init__(self) -> None:
        self._kernels: dict[str, Any] = {}

    def launch(self, name: str, blocks: int, arguments: Sequence[int]) -> None:
        """Run the kernel ``name`` on the current stream; arguments are addresses and integers."""
        from cuda.core import LaunchConfig, launch

        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self.code.get_kernel(name)
        with torch.cuda.device(self.device):
            stream = _stream(torch.cuda.current_stream().cuda_stream)
            config = LaunchConfig(grid=(blocks, 1, 1), block=(THREADS, 1, 1))
            launch(stream, config, kernel, *arguments)


class CudaReading:
    """A copy to page-locked memory on torch's current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.values.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether ``values`` are there."""
        return bool(self._event.query())


@functools.lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    """Return torch's stream as ``cuda.core`` knows it; torch never destroys its streams."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


class CudaMachine:
    """One CUDA device; made once for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._modules: dict[str, CudaModule] = {}

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> CudaMachine:
        """Return the machine of ``device``."""
        return CudaMachine(device)

    def load(self, source: str, cache_dir: Path | None) -> CudaModule:
        """Return ``source`` for this device, compiled and loaded once.

        Raises:
            CodegenError: ``cuda.core`` or NVRTC is missing, or the driver is too old for them.
        """
        if source not in self._modules:
            version = nvrtc_version()
            check_driver(driver_version(), version)
            major, minor = torch.cuda.get_device_capability(self.device)
            cubin = build_cubin(source, f"sm_{major}{minor}", cache_dir)
            code = self._load(cubin.code)
            self._modules[source] = CudaModule(self.device, code, cubin.cached)
        return self._modules[source]

    def _load(self, code: bytes) -> Any:
        from cuda.core import Device, ObjectCode
        from cuda.core._utils.cuda_utils import CUDAError

        with torch.cuda.device(self.device):
            try:
                Device(self.device.index).set_current()
                return ObjectCode.from_cubin(code)
            except (CUDAError, RuntimeError) as error:
                raise CodegenError(
                    f"kernel: {torch.cuda.get_device_name(self.device)} refuses what was compiled "
                    f"for it ({error}). A newer driver may take it."
                ) from error

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether reading ``tensor`` on the host does not wait for the device."""
        return tensor.device.type == "cpu"

    def is_capturing(self) -> bool:
        """Whether launches go into a CUDA graph now."""
        return torch.cuda.is_current_stream_capturing()

    def staged(self, data: torch.Tensor) -> torch.Tensor:
        """Return ``data`` in page-locked memory; torch reuses it when its copy is done."""
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)

    def read_later(self, tensor: torch.Tensor) -> CudaReading:
        """Start to copy what ``tensor`` holds now to the host."""
        return CudaReading(tensor)

    def keep_for_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have memory of ``tensors`` outlive what the current stream does with them."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow the host to wait for the device, whatever the user forbids."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def driver_version() -> int:
    """Return the newest CUDA that the driver supports, as 1000 * major + 10 * minor."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    return int(version)


def check_driver(driver: int, nvrtc: str) -> None:
    """Compare the driver with the version that NVRTC tells of itself.

    Raises:
        CodegenError: the driver is of an older major version, which cannot load what NVRTC makes.
    """
    major = int(nvrtc.split()[-1].split(".")[0])
    if driver // 1000 < major:
        raise CodegenError(
            f"kernel: the driver supports CUDA {driver // 1000}.{driver % 1000 // 10} and {nvrtc} "
            f"(from {INSTALL}) needs {major}.0. Update the driver, or install cuda-bindings and an "
            f"NVRTC of version {driver // 1000}."
        )
