"""Steps in float16: they learn as in float32, and a step that overflows leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile.errors import CaptureError, ConfigError
from tests.steps import Classifier, batch, compile_step


class Normed(nn.Module):
    """A convolution and a batch norm, whose statistics a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.readout = nn.Linear(4 * 14, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.readout(F.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))
        return found


class Training:
    """A model, an optimizer and a step that tests can bend."""

    def __init__(
        self,
        build: Callable[[], nn.Module] = Normed,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: object,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = build()
        self.opt = optimizer(self.model.parameters(), lr=0.01)
        self.compiled = compile_step(self.step, dtype="float16", **options)

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        """Return copies of all that a step may change."""
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for index, state in enumerate(self.opt.state.values()):
            found |= {f"{index}.{key}": torch.as_tensor(v).clone() for key, v in state.items()}
        return found

    def bias(self) -> Tensor:
        return self.everything()["model.readout.bias"]

    def scale(self) -> float:
        record = mpcompile.last_report(self.compiled).loss_scale
        assert record is not None
        return record.scale


def assert_untouched(found: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    assert found.keys() == before.keys()
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert not changed


def nan_batch() -> tuple[Tensor, Tensor]:
    x, labels = batch()
    x = x.clone()
    x[0, 0] = float("nan")
    return x, labels


OVERFLOWS = {"input of 1e5": lambda: (batch()[0] * 1e5, batch()[1]), "NaN": nan_batch}


@pytest.mark.parametrize(("bad", "disable"), [("input of 1e5", []), ("NaN", ["fuse-updates"])])
def test_overflow_leaves_every_tensor_as_it_was(bad: str, disable: list[str]) -> None:
    training = Training(disable=disable)
    for _ in range(2):
        training.compiled(*batch())
    before = training.everything()
    training.compiled(*OVERFLOWS[bad]())
    assert bool(mpcompile.skipped(training.compiled))
    assert_untouched(training.everything(), before)
    assert training.scale() == 32768.0
    losses = [float(training.compiled(*batch())) for _ in range(3)]
    assert losses[2] < losses[0]
    assert not bool(mpcompile.skipped(training.compiled))


def test_overflow_in_the_first_step_leaves_every_tensor_as_it_was() -> None:
    training = Training(optimizer=torch.optim.SGD)
    before = training.everything()
    training.compiled(*nan_batch())
    assert_untouched(training.everything(), before)
    training.compiled(*batch())
    assert not torch.equal(
        training.everything()["model.readout.bias"], before["model.readout.bias"]
    )


@pytest.mark.parametrize("disable", [[], ["fuse-updates"]])
def test_one_infinite_gradient_skips_the_step(disable: list[str]) -> None:
    training = Training(Classifier, disable=disable)
    spoil = [False]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def hook() -> None:
        grad = training.model.readout.bias.grad
        if spoil[0]:
            grad[0] = float("inf")

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels)
        loss.backward()
        hook()
        training.opt.step()
        training.opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step, dtype="float16", disable=disable)
    for _ in range(2):
        compiled(*batch())
    before = training.everything()
    spoil[0] = True
    compiled(*batch())
    assert_untouched(training.everything(), before)
    assert bool(mpcompile.skipped(compiled))


def test_clamped_overflow_is_still_seen() -> None:
    training = Training()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels)
        loss.backward()
        nn.utils.clip_grad_value_(training.model.parameters(), 0.1)
        training.opt.step()
        training.opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step, dtype="float16")
    for _ in range(2):
        compiled(*batch())
    before = training.everything()
    compiled(*nan_batch())
    assert_untouched(training.everything(), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_step_learns_as_in_float32(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    half, wide = (Training(Classifier, optimizer) for _ in range(2))
    for _ in range(8):
        found, expected = half.compiled(*batch()), wide.step(*batch())
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=0.0)
    assert half.scale() == 65536.0


def test_gradients_below_half_range_are_kept() -> None:
    """2**-24 is the smallest number of float16: these would have two bits at most."""
    training = Training(Classifier, torch.optim.SGD)

    def backward(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels) * 2.0**-22
        loss.backward()
        return loss.detach()

    def gradients(run: Callable[..., Tensor]) -> Tensor:
        training.opt.zero_grad()
        run(*batch())
        return torch.cat([p.grad.flatten() for p in training.model.parameters()])

    expected = gradients(backward)
    found = gradients(compile_step(backward, dtype="float16"))
    assert expected.abs().max() < 2.0**-21
    assert (found - expected).norm() < 5e-3 * expected.norm()
    with pytest.warns(UserWarning, match="float16 without scale-loss: gradients below 6e-8 are"):
        unscaled = compile_step(backward, dtype="float16", disable="scale-loss")
    assert (gradients(unscaled) - expected).norm() > 0.1 * expected.norm()


def test_gradients_are_true_ones_where_the_program_sees_them() -> None:
    training = Training(Classifier)
    seen: list[float] = []

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 100.0)
        seen.append(norm.item())
        training.opt.zero_grad()
        return loss.detach()

    compile_step(step, dtype="float16")(*batch())
    step(*batch())
    assert seen[0] == pytest.approx(seen[1], rel=1e-3)
    assert training.model.readout.weight.grad is None


@pytest.mark.parametrize("capture", ["whole", "regions"])
def test_hooks_see_true_gradients(capture: str) -> None:
    training = Training(Classifier)
    norms: list[Tensor] = []

    def step(x: Tensor, labels: Tensor) -> Tensor:
        hidden = training.model.read_in(x)
        hidden.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        loss = F.cross_entropy(training.model.readout(hidden), labels)
        loss.backward()
        norms.append(training.model.read_in.weight.grad.norm())
        training.opt.zero_grad()
        return loss.detach()

    compile_step(step, dtype="float16", capture=capture)(*batch())
    step(*batch())
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-2, atol=0.0)


def test_each_optimizer_skips_for_itself() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(16, 8), nn.Linear(16, 8)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]

    def step(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        first = F.cross_entropy(one(x), labels)
        first.backward()
        opts[0].step()
        second = F.cross_entropy(two(y), labels)
        second.backward()
        opts[1].step()
        for opt in opts:
            opt.zero_grad()
        return first.detach() + second.detach()

    compiled = compile_step(step, dtype="float16")
    x, labels = batch()
    compiled(x, x, labels)
    before = one.weight.detach().clone(), two.weight.detach().clone()
    compiled(x * 1e5, x, labels)
    assert torch.equal(one.weight, before[0])
    assert not torch.equal(two.weight, before[1])
    compiled(x, x * 1e5, labels)
    assert not torch.equal(one.weight, before[0])
    assert mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"] == 16384.0


def test_accumulated_overflow_skips_the_update_that_reads_it() -> None:
    training = Training()

    def micro(x: Tensor, labels: Tensor, last: bool) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels) / 2
        loss.backward()
        if last:
            training.opt.step()
            training.opt.zero_grad()
        return loss.detach()

    compiled = compile_step(micro, dtype="float16")
    for last in (False, True, False, True):
        compiled(*batch(), last)
    before = training.everything()
    compiled(*nan_batch(), False)
    compiled(*batch(), True)
    assert_untouched(training.everything(), before)
    compiled(*batch(), False)
    compiled(*batch(), True)
    assert not torch.equal(
        training.everything()["model.readout.bias"], before["model.readout.bias"]
    )


def test_average_of_weights_in_the_step_stands_still_too() -> None:
    training = Training(Classifier)
    average = [param.detach().clone() for param in training.model.parameters()]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = training.step(x, labels)
        with torch.no_grad():
            for kept, param in zip(average, training.model.parameters(), strict=True):
                kept.lerp_(param, 0.1)
        return loss

    compiled = compile_step(step, dtype="float16")
    for _ in range(2):
        compiled(*batch())
    before = [kept.clone() for kept in average]
    compiled(*nan_batch())
    assert all(map(torch.equal, average, before))
    compiled(*batch())
    assert not torch.equal(average[0], before[0])


# --- scaling by the program, models alone --------------------------------------------------------


def test_grad_scaler_of_the_user_keeps_working() -> None:
    training = Training(Classifier, torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(training.opt)
        scaler.step(training.opt)
        scaler.update()
        training.opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step, dtype="float16")
    plain = Training(Classifier, torch.optim.SGD)
    for _ in range(4):
        torch.testing.assert_close(compiled(*batch()), plain.step(*batch()), rtol=5e-3, atol=0.0)
    before = training.everything()
    compiled(*nan_batch())
    assert_untouched(training.everything(), before)
    assert scaler.get_scale() == 512.0
    report = mpcompile.last_report(compiled)
    assert report.loss_scale is not None
    assert report.loss_scale.own_scale == 1024.0
    assert "scaling by the program" in str(report)


def test_model_alone_is_refused() -> None:
    model = compile_step(Classifier(), dtype="float16")
    x, labels = batch()
    with pytest.raises(CaptureError, match=r"backward runs outside.*Compile the whole step.*bfloa"):
        F.cross_entropy(model(x), labels).backward()


def test_model_alone_is_taken_if_the_program_scales() -> None:
    torch.manual_seed(0)
    model, twin = Classifier(), Classifier()
    twin.load_state_dict(model.state_dict())
    compiled = compile_step(model, dtype="float16", loss_scale=1)
    x, labels = batch()
    (F.cross_entropy(compiled(x), labels) * 1024).backward()
    (F.cross_entropy(twin(x), labels) * 1024).backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=2e-2, atol=2e-2 * 1024)


def test_optimizer_outside_the_step_is_told_of() -> None:
    training = Training(Classifier)

    def backward(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(training.model(x), labels)
        loss.backward()
        return loss.detach()

    compiled = compile_step(backward, dtype="float16")
    compiled(*batch())
    with pytest.warns(UserWarning, match=r"no optimizer is part.*if not mpcompile\.skipped\(step"):
        compiled(*nan_batch())
    assert bool(mpcompile.skipped(compiled))
    training.opt.zero_grad()
    compiled(*batch())
    assert not bool(mpcompile.skipped(compiled))


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capture", "name"), [("regions", "readout.bias"), ("whole", "read_in.weight")]
)
def test_five_falls_in_a_row_are_told_of_once_with_a_name(capture: str, name: str) -> None:
    training = Training(Classifier, capture=capture)
    for _ in range(2):
        training.compiled(*batch())
    for _ in range(4):
        training.compiled(*nan_batch())
    told = rf"5 steps in a row.*loss scale is 2048.*that of self\.model\.{name}\. "
    with pytest.warns(UserWarning, match=told):
        training.compiled(*nan_batch())
    training.compiled(*nan_batch())


def test_visible_gradients_of_a_whole_step_have_names() -> None:
    training = Training(Classifier, torch.optim.SGD)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        F.cross_entropy(training.model(x), labels).backward()
        norm: Tensor = training.model.read_in.bias.grad.norm()
        training.opt.step()
        training.opt.zero_grad()
        return norm

    compiled = compile_step(step, dtype="float16")
    compiled(*batch())
    compiled(*nan_batch())
    report = mpcompile.last_report(compiled)
    assert not report.breaks
    assert report.loss_scale is not None
    assert report.loss_scale.first == "training.model.read_in.bias"


def test_floor_is_told_of() -> None:
    training = Training(Classifier, loss_scale="dynamic", scale_floor=32768)
    training.compiled(*batch())
    with pytest.warns(UserWarning, match=r"although the loss scale is at its floor, 32768"):
        training.compiled(*nan_batch())
    assert training.scale() == 32768.0


def test_graphs_read_no_value_on_the_host() -> None:
    training = Training(disable=["fuse-updates"], capture="regions")
    for _ in range(2):
        training.compiled(*batch())
    texts = [region.aten_after for region in mpcompile.last_report(training.compiled).regions]
    assert "mpcompile.skip_update" in "".join(texts)
    assert "mpcompile.note_overflow" in "".join(texts)
    assert "_local_scalar_dense" not in "".join(texts)


def test_explain_names_the_node_that_overflows() -> None:
    weight, readout = nn.Parameter(torch.full((16, 4), 300.0)), torch.ones(4, 2)

    def step(x: Tensor) -> Tensor:
        hidden = F.relu(x @ weight)
        large = hidden * 40.0  # 4800 before, above 65504 behind
        loss = (large @ readout).mean()
        loss.backward()
        return loss.detach()

    options = {"dtype": "float16", "loss_scale": 16}
    report = mpcompile.explain(step, torch.ones(3, 16), options=options)
    assert report.overflow is not None
    assert not report.overflow.is_backward
    assert "aten.mul" in report.overflow.text
    assert report.overflow.line.startswith("test_float16.py:")
    assert "First Inf or NaN" in str(report)
    assert mpcompile.explain(step, torch.ones(3, 16) / 99, options=options).overflow is None
    assert weight.grad is None


def test_explain_names_an_input_that_is_not_finite() -> None:
    report = mpcompile.explain(Training(Classifier).compiled, *nan_batch())
    assert report.overflow is not None
    assert "placeholder" in report.overflow.text


# --- state ---------------------------------------------------------------------------------------


def test_state_goes_from_one_step_to_another() -> None:
    first, second = Training(Classifier), Training(Classifier)
    first.compiled(*nan_batch())
    first.compiled(*batch())
    saved = mpcompile.state_dict(first.compiled)
    assert saved["loss_scale"]["cpu"]["scale"] == 32768.0
    mpcompile.load_state_dict(second.compiled, saved)
    assert mpcompile.state_dict(second.compiled) == saved
    second.compiled(*batch())
    assert mpcompile.state_dict(second.compiled)["loss_scale"]["cpu"]["good"] == 2.0


def test_state_of_an_unscaled_step_is_empty_and_takes_any() -> None:
    compiled = compile_step(lambda x: x + 1)
    assert mpcompile.state_dict(compiled) == {"loss_scale": {}, "sync": []}
    mpcompile.load_state_dict(compiled, {"loss_scale": {"cpu": {"scale": 1.0}}, "sync": []})
    assert not bool(mpcompile.skipped(compiled))


def test_wrong_states_are_refused() -> None:
    compiled = Training(Classifier).compiled
    with pytest.raises(
        ConfigError, match=r"found the entries param_groups, expected loss_scale and"
    ):
        mpcompile.load_state_dict(compiled, {"param_groups": []})
    with pytest.raises(ConfigError, match=r"loss scale of cpu lacks inverse, good"):
        mpcompile.load_state_dict(compiled, {"loss_scale": {"cpu": {"scale": 1.0}}, "sync": []})
    plain: Any = lambda: None  # noqa: E731
    for call in (mpcompile.skipped, mpcompile.state_dict):
        with pytest.raises(CaptureError, match=rf"{call.__name__}: .* is not what torch\.compile"):
            call(plain)
