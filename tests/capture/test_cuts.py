"""Regions are cut where nothing differentiable crosses, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.graph.roles import GraphKind
from tests.steps import compile_step


def _nets() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})


def _apart(nets: Any, x: Tensor) -> list[Tensor]:
    return [nets["one"](x).square().mean(), nets["two"](x).square().mean()]


def _one_feeds_the_other(nets: Any, x: Tensor) -> list[Tensor]:
    made = nets["one"](x)
    size = made.sum()
    return [size, nets["two"](made.detach()).mean()]


def _shared(nets: Any, x: Tensor) -> list[Tensor]:
    hidden = nets["one"](x)
    return [hidden.square().mean(), nets["two"](hidden).mean()]


def _interleaved(nets: Any, x: Tensor) -> list[Tensor]:
    one, two = nets["one"](x), nets["two"](x)
    return [one.square().mean(), two.square().mean()]


def _in_autocast(nets: Any, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return [loss.float() for loss in _apart(nets, x)]


def _leaf_made_inside(nets: Any, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    return [nets["one"](x).mean(), nets["two"](leaf).mean() + leaf.sum()]


def _written_into(nets: Any, x: Tensor) -> list[Tensor]:
    one = nets["one"](x)
    early = nets["two"](x).mean()
    one[0] = 0
    return [early, one.sum()]


def _op_of_several_values(nets: Any, x: Tensor) -> list[Tensor]:
    hidden = nets["one"](x)
    size, log_probs = hidden.mean(), hidden.log_softmax(-1).unsqueeze(1)
    aligned = F.ctc_loss(log_probs, torch.tensor([[1]]), torch.tensor([3]), torch.tensor([1]))
    return [size, aligned, nets["two"](x).mean()]


def _grads(nets: Any, losses: list[Tensor], **options: Any) -> list[Any]:
    for loss in losses:
        loss.backward(**options)
    return [None if p.grad is None else p.grad.clone() for p in nets.parameters()]


CASES: dict[Callable[..., Any], int] = {
    _apart: 2, _one_feeds_the_other: 2, _leaf_made_inside: 2,
    _shared: 1, _interleaved: 1, _in_autocast: 1, _written_into: 1,
}  # fmt: skip


@pytest.mark.parametrize("losses", CASES, ids=lambda function: function.__name__)
def test_region_has_as_many_backwards_as_histories(losses: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    nets, ours = _nets(), _nets()
    kwargs = {} if CASES[losses] == 2 else {"retain_graph": True}
    expected = _grads(nets, losses(nets, x), **kwargs)
    compiled = compile_step(lambda x: losses(ours, x), dtype="float32")
    found = _grads(ours, compiled(x), **kwargs)
    training = [r for r in last_report(compiled).regions if r.kind is GraphKind.TRAINING]
    assert len(training) == CASES[losses]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_op_of_several_values_is_in_one_part() -> None:
    x, nets, ours = torch.linspace(-1, 1, 12).reshape(3, 4), _nets(), _nets()
    expected = _grads(nets, _op_of_several_values(nets, x), retain_graph=True)
    compiled = compile_step(lambda x: _op_of_several_values(ours, x), dtype="float32")
    assert all(map(torch.equal, expected, _grads(ours, compiled(x), retain_graph=True)))
    assert len(last_report(compiled).regions) == 2


def test_second_history_gives_no_gradient_to_the_first() -> None:
    nets = _nets()
    compiled = compile_step(lambda x: _apart(nets, x), dtype="float32")
    compiled(torch.ones(3, 4))[1].backward()
    assert nets["one"].weight.grad is None
    assert nets["two"].weight.grad is not None


def test_regions_that_were_asked_for_are_as_dynamo_makes_them() -> None:
    nets = _nets()
    compiled = compile_step(lambda x: _apart(nets, x), dtype="float32", capture="regions")
    compiled(torch.ones(3, 4))
    assert len(last_report(compiled).regions) == 1


def test_gan_step_that_uses_fake_twice_trains_as_eager() -> None:
    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        nets = nn.ModuleDict({"make": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
        opts = {name: torch.optim.Adam(nets[name].parameters(), lr=0.01) for name in nets}

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            nets["judge"].zero_grad()
            F.softplus(-nets["judge"](x)).mean().backward()
            fake = nets["make"](x)
            judged = F.softplus(nets["judge"](fake.detach())).mean()
            judged.backward()
            opts["judge"].step()
            nets["make"].zero_grad()
            made = F.softplus(-nets["judge"](fake)).mean()
            made.backward()
            opts["make"].step()
            return judged.detach(), made.detach()

        return nets, step

    (eager, step), (nets, ours) = build(), build()
    compiled = compile_step(ours, dtype="float32", disable=["fuse-updates"])
    for call in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(call))
        assert step(x) == compiled(x)
    for one, other in zip(eager.parameters(), nets.parameters(), strict=True):
        assert torch.equal(one, other)
