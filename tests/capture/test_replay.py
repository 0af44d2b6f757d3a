"""The replay of the first whole step: what is wrong is an error, what is rounding is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.errors import CaptureError
from mpcompile.runtime import ops
from tests.steps import classifier_step, compile_step

Spoil = Callable[[list[Any]], None]


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 16, generator=generator), torch.arange(12) % 8


def _leave_one_out(grads: list[Any]) -> None:
    grads[2] = torch.zeros_like(grads[2])


def _count_one_five_times(grads: list[Any]) -> None:
    grads[2] = grads[2] * 5


def _go_uphill(grads: list[Any]) -> None:
    grads[:] = [-grad for grad in grads]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Return what has a whole step update from gradients that are not what its loss gives."""

    def install(change: Spoil) -> None:
        stock = ops.run_update

        def run_update(handle: str, grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            given = list(grads)
            change(given)
            return stock(handle, given, *args, **kwargs)

        monkeypatch.setattr(ops, "run_update", run_update)

    return install


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_leave_one_out, r"'norm.weight' moved by 0 \(rms\) where eager moves it"),
        (_count_one_five_times, r"'norm.weight' moved by .* where eager moves it"),
        (_go_uphill, r"all parameters together moved in another direction than eager \(-"),
    ],
)
def test_step_that_is_wrong_is_an_error_and_leaves_all_as_it_was(
    change: Spoil, words: str, dtype: str, spoil: Callable[[Spoil], None]
) -> None:
    model, step = classifier_step()
    before = [param.detach().clone() for param in model.parameters()]
    random_state = torch.get_rng_state()
    spoil(change)
    with pytest.raises(CaptureError, match=words):
        compile_step(step, dtype=dtype)(*_batch())
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
        assert param.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_step_that_is_wrong_later_is_an_error_if_always_checked(
    spoil: Callable[[Spoil], None],
) -> None:
    _, step = classifier_step()
    compiled = compile_step(step, check="always")
    compiled(*_batch())
    assert last_report(compiled).replayed == 1
    spoil(_leave_one_out)
    with pytest.raises(CaptureError, match=r"'norm.weight' moved by 0"):
        compiled(*_batch())


def test_step_that_is_wrong_passes_unchecked(spoil: Callable[[Spoil], None]) -> None:
    _, step = classifier_step()
    spoil(_leave_one_out)
    compiled = compile_step(step, check="off")
    compiled(*_batch())
    assert last_report(compiled).replayed == 0


class _Sensitive(nn.Module):
    """Has a small difference of large 16-bit numbers in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
        self.far = nn.Parameter(torch.full((32,), 150.0))

    def forward(self, x: Tensor) -> Tensor:
        moved = F.linear(self.layers(x), torch.eye(32), self.far)
        loss: Tensor = (moved - self.far.detach()).square().add(1e-3).log().mean()
        return loss


def _sensitive_step() -> tuple[_Sensitive, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = _Sensitive()
    opt = torch.optim.SGD(model.layers.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, step


def test_step_that_autocast_rounds_as_far_off_trains_with_a_warning() -> None:
    model, step = _sensitive_step()
    before = model.layers[0].weight.detach().clone()
    compiled = compile_step(step)
    with pytest.warns(UserWarning, match=r"very sensitive to rounding to 16 bits"):
        compiled(_batch()[0])
    once, _ = _sensitive_step()
    assert not torch.equal(model.layers[0].weight, before)
    assert torch.equal(once.layers[0].weight, before)


def test_step_that_goes_uphill_is_no_rounding_however_sensitive(
    spoil: Callable[[Spoil], None],
) -> None:
    _, step = _sensitive_step()
    spoil(_go_uphill)
    with pytest.raises(CaptureError, match="moved in another direction"):
        compile_step(step)(_batch()[0])


def test_step_that_cannot_run_under_autocast_is_an_error_if_wrong(
    spoil: Callable[[Spoil], None],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = F.binary_cross_entropy(model(x).sigmoid(), torch.ones(12, 1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    spoil(_go_uphill)
    with pytest.raises(CaptureError, match="moved in another direction"):
        compile_step(step)(_batch()[0])
