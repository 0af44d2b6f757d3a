"""Who meets the fused update and who meets the optimizer's own step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mpcompile.runtime import dispatch
from mpcompile.runtime.updates import Updates
from tests.runtime.updating import parameters, set_grads


class Recorder:
    """Stands for a step of ours: notes who came and runs the original."""

    def __init__(self) -> None:
        self.seen: list[torch.optim.Optimizer] = []

    def __call__(self, optimizer: torch.optim.Optimizer, original: Any) -> None:
        self.seen.append(optimizer)
        with dispatch.suspended():
            original(optimizer)


def _optimizer(cls: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls(parameters(), lr=0.1)
    set_grads(0, optimizer.param_groups[0]["params"])
    return optimizer


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def test_step_in_a_compiled_frame_is_ours() -> None:
    optimizer, recorder = _optimizer(), Recorder()
    step = _compiled(lambda: optimizer.step())
    for _ in range(3):
        with dispatch.running(recorder):
            step()
    assert recorder.seen == [optimizer] * 3


def test_bound_step_compiled_alone_is_ours() -> None:
    optimizer, recorder = _optimizer(), Recorder()
    step = _compiled(optimizer.step)
    with dispatch.running(recorder):
        step()
    assert recorder.seen == [optimizer]


def test_step_wrapped_by_a_scheduler_before_is_ours() -> None:
    optimizer, recorder = _optimizer(), Recorder()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    step = _compiled(lambda: optimizer.step())
    with dispatch.running(recorder):
        step()
    assert recorder.seen == [optimizer]


def test_class_defined_later_is_ours() -> None:
    class Later(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()

    optimizer, recorder = _optimizer(Later), Recorder()
    step = _compiled(lambda: optimizer.step())
    with dispatch.running(recorder):
        step()
    assert recorder.seen == [optimizer]


def test_eager_step_meets_the_original() -> None:
    optimizer, recorder = _optimizer(), Recorder()
    with dispatch.running(recorder):
        pass
    optimizer.step()
    assert recorder.seen == []


def test_other_thread_meets_the_original() -> None:
    optimizer, recorder = _optimizer(), Recorder()
    with dispatch.running(recorder):
        thread = threading.Thread(target=_compiled(lambda: optimizer.step()))
        thread.start()
        thread.join()
    assert recorder.seen == []


def test_code_excluded_from_compilation_meets_the_original() -> None:
    optimizer, recorder = _optimizer(), Recorder()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def aside() -> None:
        optimizer.step()

    def step(x: torch.Tensor) -> torch.Tensor:
        aside()
        return x + 1

    with dispatch.running(recorder):
        _compiled(step)(torch.ones(2))
    assert recorder.seen == []


def test_closure_of_torchs_optimizers_is_called_before_our_update() -> None:
    optimizer, calls = _optimizer(), list[str]()

    def closure() -> float:
        calls.append("closure")
        return 0.0

    def ours(optimizer: torch.optim.Optimizer, original: Any) -> None:
        calls.append("update")

    with dispatch.running(ours):
        _compiled(lambda: optimizer.step(closure))()
    assert calls == ["closure", "update"]


def test_closure_that_may_be_called_more_than_once_meets_the_original() -> None:
    params, recorder = parameters(), Recorder()
    optimizer = torch.optim.LBFGS(params, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((param.square().sum() for param in params), torch.zeros(()))
        loss.backward()
        return loss

    with dispatch.running(recorder):
        _compiled(lambda: optimizer.step(closure))()
    assert recorder.seen == []


def test_hooks_run_around_our_update() -> None:
    optimizer, updates, calls = _optimizer(torch.optim.AdamW), Updates(), list[str]()
    optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *args: calls.append("post"))
    step = _compiled(lambda: optimizer.step())
    for _ in range(3):
        with dispatch.running(updates.run):
            step()
    assert calls == ["pre", "post"] * 3
    assert updates.of(optimizer).num_prepared > 0


def test_other_backend_still_compiles_the_step() -> None:
    optimizer, sizes = _optimizer(), list[int]()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(len(gm.graph.nodes))
        return gm.forward

    torch.compile(lambda: optimizer.step(), backend=backend)()
    assert max(sizes) > len(optimizer.param_groups[0]["params"])


def test_flag_goes_down_after_an_error() -> None:
    with pytest.raises(ValueError, match="on purpose"), dispatch.running(Recorder()):
        raise ValueError("on purpose")
    assert not dispatch.is_ours()
