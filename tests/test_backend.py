"""Every graph that Dynamo makes of a training step compiles and is right against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from mpcompile.backend import last_report, mpcompile
from mpcompile.graph.roles import GraphKind
from tests.steps import Classifier, Step, batch, compile_step

Built = tuple[list[nn.Module], Step]


def plain_sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def clipped_by_norm() -> Built:
    model = Classifier()
    opt = plain_sgd(model)

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return loss.detach(), norm

    return [model], step


def clipped_by_value() -> Built:
    model = Classifier()
    opt = plain_sgd(model, momentum=0.9)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return [model], step


def averaged_weights() -> Built:
    model = Classifier()
    average = copy.deepcopy(model)
    opt = plain_sgd(model)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss.detach()

    return [model, average], step


def evaluated_between_steps() -> Built:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    opt = plain_sgd(model)

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            found = F.cross_entropy(model(x), labels)
        model.train()
        return loss.detach(), found

    return [model], step


def detached_target() -> Built:
    model = Classifier()
    opt = plain_sgd(model)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        target = model(x.flip(0)).detach()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return [model], step


def accumulated_in_a_loop() -> Built:
    model = Classifier()
    opt = plain_sgd(model)

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels) / 3

    def step(x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(())
        for rows, wanted in zip(x.chunk(3), labels.chunk(3), strict=True):
            loss = loss_of(rows, wanted)
            loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return [model], step


def scheduled() -> Built:
    model = Classifier()
    opt = plain_sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch))

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
        return loss.detach(), opt.param_groups[0]["lr"]

    return [model], step


def two_optimizers() -> Built:
    maker, judge = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    make_opt, judge_opt = plain_sgd(maker), plain_sgd(judge, momentum=0.5)

    def step(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        judge_opt.zero_grad()
        judged = F.softplus(judge(maker(x).detach())).mean() + F.softplus(-judge(x)).mean()
        judged.backward()
        judge_opt.step()
        make_opt.zero_grad()
        made = F.softplus(-judge(maker(x))).mean()
        made.backward()
        make_opt.step()
        return judged.detach(), made.detach()

    return [maker, judge], step


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, alg. 2, as a user writes it: the state holds no step count."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
                state["m"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * param
                trust = torch.where(param.norm() > 0, param.norm() / update.norm(), 1.0)
                param.sub_(group["lr"] * trust * update)


def lamb() -> Built:
    model = Classifier()
    opt = Lamb(model.parameters())

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return [model], step


def gradients_by_hand() -> Built:
    model = Classifier()
    parameters = list(model.parameters())

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.sub_(0.1 * grad)
        return loss.detach()

    return [model], step


STEPS = (
    clipped_by_norm,
    clipped_by_value,
    averaged_weights,
    evaluated_between_steps,
    detached_target,
    accumulated_in_a_loop,
    scheduled,
    two_optimizers,
    lamb,
    gradients_by_hand,
)


def train(build: Callable[[], Built], num_steps: int, **options: object) -> tuple[Any, Any, Any]:
    """Return what each step gave, all state afterwards, and the compiled step."""
    torch.manual_seed(0)
    models, step = build()
    compiled: Any = compile_step(step, **options) if options else step
    results = [compiled(*batch()) for _ in range(num_steps)]
    return results, [dict(model.state_dict()) for model in models], compiled


@pytest.mark.parametrize(
    "build", [build for build in STEPS if build is not lamb], ids=lambda build: build.__name__
)
def test_step_is_bitwise_eager_in_float32(build: Callable[[], Built]) -> None:
    results, state, _ = train(build, 4)
    found, found_state, _ = train(build, 4, dtype="float32")
    torch.testing.assert_close(found, results, rtol=0, atol=0)
    torch.testing.assert_close(found_state, state, rtol=0, atol=0)


@pytest.mark.parametrize("build", STEPS, ids=lambda build: build.__name__)
def test_step_follows_eager_in_bfloat16(build: Callable[[], Built]) -> None:
    results, state, _ = train(build, 3)
    found, found_state, compiled = train(build, 3, dtype="bfloat16")
    torch.testing.assert_close(found, results, rtol=0.05, atol=0.02)
    torch.testing.assert_close(found_state, state, rtol=0.1, atol=0.02)
    regions = last_report(compiled).regions
    assert any(region.casts for region in regions if region.kind is GraphKind.TRAINING)
    assert not any(region.casts for region in regions if region.kind is GraphKind.UPDATE)


UNFUSED: Any = {"disable": "fuse-updates", "capture": "regions"}
"""Each part of the step is a graph that torch.compile of any backend would get."""


@pytest.mark.parametrize("build", [clipped_by_norm, lamb, averaged_weights])
def test_updates_are_left_as_traced(build: Callable[[], Built]) -> None:
    _, _, compiled = train(build, 2, dtype="bfloat16", **UNFUSED)
    updates = [r for r in last_report(compiled).regions if r.kind is GraphKind.UPDATE]
    assert updates
    assert all(region.graph.diff() == "" for region in updates)
    assert all(set(region.ops_after.ops) <= {"f32", "b8", "i64"} for region in updates)


def adamw() -> Built:
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return [model], step


@pytest.mark.parametrize("build", [adamw, lamb])
def test_update_is_bitwise_that_of_stock_torch_compile(build: Callable[[], Built]) -> None:
    found, found_state, _ = train(build, 4, dtype="float32", **UNFUSED)
    torch.manual_seed(0)
    models, step = build()
    stock: Any = torch.compile(step, backend="aot_eager")
    results = [stock(*batch()) for _ in range(4)]
    torch.testing.assert_close(found, results, rtol=0, atol=0)
    state = [dict(model.state_dict()) for model in models]
    torch.testing.assert_close(found_state, state, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedule_does_not_stop_compiling(dtype: str) -> None:
    results, _, compiled = train(scheduled, 12, dtype=dtype)
    expected, _, _ = train(scheduled, 12)
    torch.testing.assert_close(results, expected, rtol=0.05, atol=0.02)
    assert sum(r.kind is GraphKind.TRAINING for r in last_report(compiled).regions) == 1


def test_gan_step_that_makes_its_sample_twice_trains_both_in_16_bits() -> None:
    _, _, compiled = train(two_optimizers, 2, dtype="bfloat16")
    training = [r for r in last_report(compiled).regions if r.kind is GraphKind.TRAINING]
    assert len(training) >= 2
    assert all(region.ops_after.half_share() == 1 for region in training)


def test_lengths_may_vary() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens).square().mean()
        return loss

    compiled = compile_step(loss_of)
    for length in (5, 7, 9, 11):
        tokens = torch.arange(2 * length).reshape(2, length) % 10
        found = compiled(tokens)
        found.backward()
        assert found.item() == pytest.approx(loss_of(tokens).item(), rel=1e-2)
    assert len(last_report(compiled).regions) == 2


def test_sizes_that_depend_on_data_compile() -> None:
    model = nn.Linear(8, 8)

    def loss_of(x: Tensor) -> Tensor:
        picked = model(x)[x[:, 0] > 0]
        loss: Tensor = picked.square().mean()
        return loss

    x = torch.randn(8, 8)
    x[0, 0] = 1
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_step(loss_of)
        found = compiled(x)
    found.backward()
    assert found.item() == pytest.approx(loss_of(x).item(), rel=2e-2)
    assert last_report(compiled).regions[0].casts


def test_fullgraph_of_a_module_compiles() -> None:
    model = Classifier()
    compiled: Any = torch.compile(
        model, backend="mpcompile", fullgraph=True, options={"lowering": "eager"}
    )
    x, labels = batch()
    F.cross_entropy(compiled(x), labels).backward()
    assert model.readout.weight.grad is not None
    assert model.readout.weight.grad.dtype is torch.float32


def test_backend_may_be_called_by_hand() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (x * 2,))
    assert isinstance(gm, GraphModule)
    x = torch.ones(2)
    compiled = mpcompile(gm, [x], options={"lowering": "eager"})
    assert compiled(x)[0].tolist() == [2, 2]


def test_steps_under_autocast_keep_the_users_dtypes() -> None:
    model = Classifier()
    x, _ = batch()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = model(x)
        return out

    found = compile_step(forward)(x)
    assert found.dtype is forward(x).dtype is torch.bfloat16
    torch.testing.assert_close(found, forward(x), rtol=0.05, atol=0.05)
