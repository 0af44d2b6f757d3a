"""Devices other than the host on which an update can run, by device type.

Everything that touches a driver is behind ``Machine``; the rest of the runtime works on tensors and
addresses. So a test can put a machine in place that runs the emitted CUDA text on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch


class Module(Protocol):
    """One emitted source, loaded. ``cached`` says that nothing was compiled."""

    cached: bool

    def launch(self, name: str, blocks: int, arguments: Sequence[int]) -> None:
        """Run the kernel ``name`` on the current stream; arguments are addresses and integers."""


class Reading(Protocol):
    """Numbers of a device on their way to the host."""

    values: torch.Tensor

    def has_arrived(self) -> bool:
        """Whether ``values`` are there."""


class Machine(Protocol):
    """A device that runs emitted CUDA text."""

    device: torch.device

    def load(self, source: str, cache_dir: Path | None) -> Module:
        """Return ``source``, compiled and loaded.

        Raises:
            CodegenError: a compiler, a library or the driver is missing or too old.
        """

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether reading ``tensor`` on the host does not wait for the device."""

    def is_capturing(self) -> bool:
        """Whether launches go into a CUDA graph now."""

    def staged(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``data`` from which the device can read at any time."""

    def read_later(self, tensor: torch.Tensor) -> Reading:
        """Start to copy what ``tensor`` holds now to the host."""

    def keep_for_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have memory of ``tensors`` outlive what the current stream does with them."""

    def waiting(self) -> AbstractContextManager[None]:
        """Allow the host to wait for the device, whatever the user forbids."""


def _cuda(device: torch.device) -> Machine:
    from mpcompile.runtime.cuda_machine import CudaMachine

    return CudaMachine.of(device)


MACHINES: dict[str, Callable[[torch.device], Machine]] = {"cuda": _cuda}


def waiting(device: torch.device) -> AbstractContextManager[None]:
    """Allow what waits for ``device``, as making an update ready does."""
    machine = machine_of(device)
    return nullcontext() if machine is None else machine.waiting()


def machine_of(device: torch.device) -> Machine | None:
    """Return the machine for ``device``, or None if updates there run as C++ on the host."""
    make = MACHINES.get(device.type)
    return None if make is None else make(device)


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on a device that runs updates, for which a host that reads it waits."""
    machine = machine_of(tensor.device)
    return machine is not None and not machine.on_host(tensor)
