"""Fixtures that have updates run as CUDA text on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpcompile.runtime import machines
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.cubins import check_cubins


@pytest.fixture
def host_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMachine]:
    """Return the machine that runs the updates of this test; step counts are on the device.

    Every kernel that the test generates is compiled for GPUs as well.
    """
    machine = HostMachine(scalars_on_host=False, reverse=True)
    monkeypatch.setitem(machines.MACHINES, "cpu", lambda device: machine)
    yield machine
    for source in machine.modules:
        check_cubins(source)
