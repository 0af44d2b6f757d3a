"""float16 in steps that are one graph: scaled at the seed, unscaled inside the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.steps import Classifier, batch, compile_step

Step = Callable[[Tensor, Tensor], Tensor]
Built = tuple[Step, Callable[[], list[Tensor]]]


def clipped() -> Built:
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, lambda: list(model.parameters())


def value_clipped() -> Built:
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, lambda: list(model.parameters())


def averaged() -> Built:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    average = [param.detach().clone() for param in model.parameters()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for kept, param in zip(average, model.parameters(), strict=True):
                kept.lerp_(param, 0.1)
        return loss.detach()

    return step, lambda: [*model.state_dict().values(), *average]


def accumulated() -> Built:
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(())
        for part, wanted in zip(x.split(6), labels.split(6), strict=True):
            loss = F.cross_entropy(model(part), wanted) / 2
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return step, lambda: list(model.parameters())


def shared() -> Built:
    """Two optimizers for one loss: they skip together."""
    model = Classifier()
    first, last = model.read_in, model.readout
    opts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, last)]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return step, lambda: [*first.parameters(), *last.parameters()]


def given() -> Built:
    """The program differentiates the loss by itself; what it gives has no room in 16 bits."""
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.1 * 2.0**20)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)
        wrong = logits.softmax(1).detach() - F.one_hot(labels, 8)
        logits.backward(wrong * (2.0**-20 / len(x)))
        opt.step()
        opt.zero_grad()
        return F.cross_entropy(logits.detach(), labels)

    return step, lambda: list(model.parameters())


def remembering() -> Built:
    """Tensors that belong to no module are written before the update: a queue, an average."""
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    queue, average = torch.zeros(3, 8), torch.zeros(())

    def step(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        queue.copy_(torch.cat([queue[1:], logits.detach().mean(0, keepdim=True)]))
        average.lerp_(loss.detach(), 0.1)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach() + 0 * queue.sum()

    return step, lambda: [*model.parameters(), queue, average]


def renormed() -> Built:
    """The forward writes to a parameter, for which AOTAutograd makes a joint graph."""
    table, readout = nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 8)
    params: list[Any] = [*table.parameters(), *readout.parameters()]
    opt = torch.optim.SGD(params, lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(readout(table(labels) + x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, lambda: params


BUILDERS = [clipped, value_clipped, averaged, accumulated, shared, given, remembering, renormed]


@pytest.mark.parametrize("build", BUILDERS)
def test_step_follows_eager_and_skips_as_a_whole(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    step, tensors = build()
    torch.manual_seed(0)
    plain, _ = build()
    compiled = compile_step(step, dtype="float16", capture="whole", check="off")
    for _ in range(3):
        torch.testing.assert_close(compiled(*batch()), plain(*batch()), rtol=5e-3, atol=0.0)
    before = [tensor.detach().clone() for tensor in tensors()]
    x, labels = batch()
    spoilt = x.clone()
    spoilt[0, 0] = float("nan")
    compiled(spoilt, labels)
    assert bool(mpcompile.skipped(compiled))
    assert all(map(torch.equal, tensors(), before))
    torch.testing.assert_close(compiled(x, labels), plain(x, labels), rtol=5e-3, atol=0.0)
    report = mpcompile.last_report(compiled)
    assert not report.breaks
    assert report.loss_scale is not None
    assert report.loss_scale.scale == 32768.0
    assert "_local_scalar_dense" not in "".join(r.aten_after for r in report.regions)


def test_gradients_go_scaled_and_16_bit_into_the_update() -> None:
    torch.manual_seed(0)
    step, _ = clipped()
    compiled = compile_step(step, dtype="float16", capture="whole", check="off")
    compiled(*batch())
    (region,) = (r for r in mpcompile.last_report(compiled).regions if "loss_scale" in r.aten_after)
    result = region.aten_after.splitlines()[-1]
    types: dict[str, Any] = dict(
        line.split(" = ")[0].split(": ") for line in region.aten_after.splitlines() if " = " in line
    )
    returned = [types[name.strip()] for name in result[len("return [") : -1].split(",")]
    assert sum(kind.startswith("f16") for kind in returned) >= 2
    assert "note_overflow" not in region.aten_after  # the update looks at what it reads


def test_small_gradients_reach_an_update_without_a_kernel() -> None:
    torch.manual_seed(0)
    model, twin = Classifier(), Classifier()
    twin.load_state_dict(model.state_dict())
    opts = [torch.optim.SGD(m.parameters(), lr=2.0**18) for m in (model, twin)]

    def build(net: nn.Module, opt: torch.optim.Optimizer) -> Step:
        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), labels) * 2.0**-22
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return step

    options = {"dtype": "float16", "capture": "whole", "check": "off", "disable": "fuse-updates"}
    compiled, plain = compile_step(build(model, opts[0]), **options), build(twin, opts[1])
    for _ in range(4):
        torch.testing.assert_close(compiled(*batch()), plain(*batch()), rtol=5e-3, atol=0.0)
