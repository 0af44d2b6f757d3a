"""The CUDA device: what is refused without one, and, marked ``gpu``, how an update runs on one."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpcompile.codegen.cuda_frame import THREADS
from mpcompile.errors import CodegenError
from mpcompile.runtime import cuda_machine, machines
from mpcompile.runtime import update as update_module
from mpcompile.runtime.cuda_machine import CudaMachine, check_driver
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.test_update import CASES, _make, _shapes
from tests.runtime.updating import parameters, relative_difference, set_grads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_driver_of_an_older_major_version_is_refused() -> None:
    check_driver(13000, "NVRTC 13.5")
    check_driver(14000, "NVRTC 13.5")
    with pytest.raises(CodegenError, match=r"driver supports CUDA 12\.4 and NVRTC 13\.5.*Update"):
        check_driver(12040, "NVRTC 13.5")


def test_cuda_updates_go_to_a_cuda_machine() -> None:
    machine = machines.machine_of(torch.device("cuda:1"))
    assert isinstance(machine, CudaMachine)
    assert machine is machines.machine_of(torch.device("cuda:1"))
    assert machines.machine_of(torch.device("cpu")) is None
    assert machine.on_host(torch.zeros(()))


class _Code:
    """Stands for a loaded cubin."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_kernel(self, name: str) -> str:
        self.asked.append(name)
        return f"kernel {name}"


def test_launch_goes_to_the_current_stream_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    launched: list[tuple[Any, ...]] = []
    entered: list[torch.device] = []

    def entering(device: torch.device) -> Any:
        entered.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(cuda.core, "launch", lambda *args: launched.append(args))
    monkeypatch.setattr(cuda_machine, "_stream", lambda handle: f"stream {handle}")
    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    code, device = _Code(), torch.device("cuda:1")
    module = cuda_machine.CudaModule(device, code, cached=True)
    for blocks in (5, 9):
        module.launch("phase_0", blocks, [11, 12])
    assert code.asked == ["phase_0"]
    assert entered == [device, device]
    grids = [(stream, config.grid, config.block) for stream, config, *_ in launched]
    assert grids == [("stream 7", (n, 1, 1), (THREADS, 1, 1)) for n in (5, 9)]
    assert [rest for _, _, *rest in launched] == [["kernel phase_0", 11, 12]] * 2


@pytest.mark.parametrize(
    "reason",
    [
        "kernel: cuda.core is not installed. pip install 'mpcompile[cuda]'",
        "kernel: the driver supports CUDA 12.4",
    ],
)
def test_what_is_missing_is_said_once_and_the_update_runs_as_eager(
    reason: str, host_machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: HostMachine, *args: Any) -> Any:
        raise CodegenError(reason)

    monkeypatch.setattr(HostMachine, "load", refuse)
    monkeypatch.setattr(update_module, "_warned", set())
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, fused=True) for params in lists]
    update = OptimizerUpdate(pair[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            set_grads(step, *lists)
            pair[0].step()
            assert not update.run().fused
    assert [reason in str(w.message) for w in caught] == [True]
    assert relative_difference(*lists) == 0.0


def _on_gpu(
    shapes: Any = ((3, 4), (7,), (130, 150), (5, 1, 3), (1,)), device: str = "cuda"
) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes)]


def _set_grads(step: int, params: list[torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_steps_on_a_card_are_eagers(name: str) -> None:
    lists = [_on_gpu(_shapes(name)), _on_gpu(_shapes(name))]
    pair = [_make(name)(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(20):
        for params in lists:
            _set_grads(step, params)
        pair[0].step()
        assert update.run().fused or step == 0, update.reason
    assert relative_difference(*lists) <= 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_host_never_waits(options: dict[str, Any]) -> None:
    params = _on_gpu()
    update = OptimizerUpdate(torch.optim.AdamW(params, lr=torch.tensor(0.01).cuda(), **options))
    plan = GradPlan(clips=(ClipNorm(0.5),), skip=torch.zeros((), device="cuda"))
    for step in range(3):
        _set_grads(step, params)
        update.run(plan=plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = update.run(plan=plan if options else GradPlan(clips=(ClipNorm(0.5),)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.fused


@needs_gpu
@pytest.mark.gpu
def test_graph_replays_what_was_captured() -> None:
    lists = [_on_gpu(), _on_gpu()]
    pair = [torch.optim.AdamW(params, capturable=True) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(3):
        for params in lists:
            _set_grads(step, params)
        pair[0].step()
        update.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update.run()
    for _ in range(5):
        pair[0].step()
        graph.replay()
    assert relative_difference(*lists) <= 1e-5


@needs_gpu
@pytest.mark.gpu
def test_steps_on_alternating_streams_are_eagers() -> None:
    lists = [_on_gpu(), _on_gpu()]
    pair = [torch.optim.AdamW(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(10):
        for params in lists:
            _set_grads(step, params)
        pair[0].step()
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            update.run()
        torch.cuda.current_stream().wait_stream(stream)
    assert relative_difference(*lists) <= 1e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")
@pytest.mark.gpu
def test_device_other_than_the_current_one() -> None:
    lists = [_on_gpu(device="cuda:1"), _on_gpu(device="cuda:1")]
    pair = [torch.optim.AdamW(params) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(4):
        for params in lists:
            _set_grads(step, params)
        pair[0].step()
        update.run()
    assert not update.reason
    assert torch.cuda.current_device() == 0
    assert relative_difference(*lists) <= 1e-5
