"""``opt.step()`` in a compiled step, and alone, runs as one kernel; equal to eager."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile.backend import last_report
from mpcompile.config import Config
from mpcompile.errors import PassError
from mpcompile.pass_base import PassContext
from mpcompile.passes import FuseUpdates
from mpcompile.runtime.updates import Updates

EAGER_FP32: dict[str, Any] = {"dtype": "float32", "lowering": "eager"}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(5, 8, generator=generator),
            torch.randint(0, 4, (5,), generator=generator),
        )
        for _ in range(count)
    ]


def _train(cls: Any, options: dict[str, Any] | None, steps: int = 5) -> tuple[list[float], Any]:
    """Return losses of eager (``options`` None) or compiled training, and the step."""
    model = _model()
    optimizer = cls(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    step: Any = _step(model, optimizer)
    if options is not None:
        step = torch.compile(step, backend="mpcompile", options=options)
    losses = []
    for x, y in _batches(steps):
        losses.append(step(x, y).item())
        scheduler.step()
    return losses, step


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam])
def test_rewritten_training_equals_eager(cls: Any) -> None:
    eager, _ = _train(cls, None)
    ours, step = _train(cls, EAGER_FP32)
    assert ours == pytest.approx(eager, rel=1e-6)
    (update,) = last_report(step).updates
    assert update.optimizer == cls.__name__
    norm, kernel = update.kernels
    assert norm.name == "gradient norm"
    assert kernel.num_tensors == 6


def test_disabled_by_name() -> None:
    eager, _ = _train(torch.optim.AdamW, None)
    ours, step = _train(torch.optim.AdamW, {**EAGER_FP32, "disable": ["fuse-updates"]})
    assert ours == pytest.approx(eager, rel=1e-6)
    (update,) = last_report(step).updates
    assert "fuse-updates is off" in update.reason
    assert update.kernels == ()


def test_disabled_in_regions() -> None:
    options = {**EAGER_FP32, "disable": ["fuse-updates"], "capture": "regions"}
    eager, _ = _train(torch.optim.AdamW, None)
    ours, step = _train(torch.optim.AdamW, options)
    assert ours == pytest.approx(eager, rel=1e-6)
    assert last_report(step).updates == []


def test_kill_switch_leaves_the_optimizer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE", "0")
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    nn.functional.cross_entropy(model(_batches(1)[0][0]), _batches(1)[0][1]).backward()
    torch.compile(optimizer.step, backend="mpcompile")()
    assert not hasattr(optimizer, "_mpcompile_updates")


def test_report_names_the_line_of_the_step() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options: Any = {**EAGER_FP32, "capture": "regions"}
    step: Any = torch.compile(_step(model, optimizer), backend="mpcompile", options=options)
    step(*_batches(1)[0])
    lines = [line for reason, line in last_report(step).breaks if "Optimizer.step" in reason]
    expected = _step.__code__.co_firstlineno + 5
    assert lines == [f"test_fuse_updates.py:{expected}"]


def test_step_compiled_alone() -> None:
    models = [_model(), _model()]
    pair = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    step = torch.compile(pair[1].step, backend="mpcompile")
    for x, y in _batches(4):
        for model in models:
            nn.functional.cross_entropy(model(x), y).backward()
        pair[0].step()
        step()
        for optimizer in pair:
            optimizer.zero_grad()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_two_optimizers_have_an_update_each() -> None:
    def train(compile_it: bool) -> Any:
        model = _model()
        layers = list(model)
        pair = [
            torch.optim.AdamW(layers[0].parameters(), lr=1e-2),
            torch.optim.SGD([*layers[1].parameters(), *layers[3].parameters()], lr=0.1),
        ]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        run: Any = step
        if compile_it:
            run = torch.compile(step, backend="mpcompile", options=EAGER_FP32)
        return [run(x, y).item() for x, y in _batches(4)], run

    ours, step = train(True)
    assert ours == pytest.approx(train(False)[0], rel=1e-6)
    assert {u.optimizer for u in last_report(step).updates} == {"AdamW", "SGD"}


def test_eager_optimizer_in_another_thread_is_left_alone() -> None:
    _train(torch.optim.AdamW, EAGER_FP32, steps=2)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.mse_loss(model(torch.ones(2, 8)), torch.ones(2, 4)).backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert not hasattr(optimizer, "_mpcompile_updates")


def test_optimizer_survives_deepcopy_and_pickle_after_updates() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(_step(model, optimizer), backend="mpcompile", options=EAGER_FP32)
    for x, y in _batches(3):
        step(x, y)
    again = copy.deepcopy(optimizer)
    assert len(again.state) == len(optimizer.state)


def test_update_op_is_bound_and_graph_left_alone() -> None:
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    updates = Updates()
    graph = torch.fx.Graph()
    grad = graph.placeholder("grad")
    handle = updates.of(optimizer).handle
    graph.call_function(torch.ops.mpcompile.update.default, (handle, [grad]))
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    before = str(gm.graph)
    assert FuseUpdates().run(gm, PassContext(Config())) == 1
    assert str(gm.graph) == before


def test_graph_without_an_update_counts_none() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert FuseUpdates().run(gm, PassContext(Config())) == 0


def test_unknown_handle_is_an_error() -> None:
    gc.collect()
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.mpcompile.update.default, ("gone", []))
    graph.output(())
    with pytest.raises(PassError, match="no optimizer has the handle gone"):
        FuseUpdates().run(torch.fx.GraphModule({}, graph), PassContext(Config()))
