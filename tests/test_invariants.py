"""What must never change: everything that the program can see, as eager fp32 leaves it.

Each case builds a model, its inputs and a step; the step runs eagerly and compiled from equal
starts, and every output, gradient, buffer and written input is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompile.backend import last_report
from tests.steps import Attention, Step, TinyGPT, compile_step

Visible = dict[str, Any]
# bfloat16 keeps 8 bits: 2^-8 per rounding, some roundings in a row. Compared with the norm of the
# whole tensor, as single gradients may cancel to nothing.
TOLERANCE = 0.03


@dataclass
class Case:
    """One model and what is done with it."""

    model: nn.Module
    inputs: tuple[Any, ...]
    step: Callable[[nn.Module], Step]
    num_steps: int = 2


def trains(loss_of: Callable[..., Tensor]) -> Callable[[nn.Module], Step]:
    """Build a step that returns loss and outputs and leaves gradients to be looked at."""

    def build(model: nn.Module) -> Step:
        def step(*inputs: Any) -> Any:
            outputs = model(*inputs)
            loss = loss_of(outputs)
            loss.backward()
            return loss.detach(), pytree.tree_map_only(Tensor, torch.Tensor.detach, outputs)

        return step

    return build


def square(outputs: Any) -> Tensor:
    """A loss over every floating output."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    floats = [leaf for leaf in leaves if leaf.is_floating_point()]
    parts = [leaf.float().square().mean() for leaf in floats]
    parts += [leaf.abs().square().mean() for leaf in leaves if leaf.is_complex()]
    return torch.stack(parts).sum()


class Wrap(nn.Module):
    """A module whose forward is a function over named submodules."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return Case(model, (torch.randn(6, 8),), trains(square))


def convnet_channels_last() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    return Case(model, (x,), trains(square))


def convnet_contiguous() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2))
    return Case(model, (torch.randn(2, 3, 8, 8),), trains(square))


def attention() -> Case:
    return Case(Attention(16, 2), (torch.randn(2, 6, 16),), trains(square))


def attention_written_out() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) * 16**-0.5).masked_fill(
            torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf")
        )
        out: Tensor = scores.softmax(-1) @ v
        return out

    return Case(Wrap(forward, qkv=nn.Linear(16, 48)), (torch.randn(2, 6, 16),), trains(square))


def embedding() -> Case:
    model = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 4))
    return Case(model, (torch.tensor([[0, 1, 2], [9, 1, 1]]),), trains(square))


def recurrent_cell() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.new_zeros(x.shape[0], 8)
        for time in range(x.shape[1]):
            hidden = self.cell(x[:, time], hidden)
        return self.out(hidden), hidden

    parts: dict[str, nn.Module] = {"cell": nn.GRUCell(4, 8), "out": nn.Linear(8, 2)}
    return Case(Wrap(forward, **parts), (torch.randn(3, 5, 4),), trains(square))


def fourier() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.inner(x), dim=-1)
        return torch.fft.irfft(spectrum * (1 + 0.5j), n=16, dim=-1), spectrum

    return Case(Wrap(forward, inner=nn.Linear(8, 16)), (torch.randn(4, 8),), trains(square))


def complex_parameters() -> Case:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.view_as_real(x * self.phase)[..., 0])
            return out

    return Case(Phase(), (torch.randn(4, 8),), trains(square))


def float64_inside() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.up(x).double().cumsum(-1)
        return self.down(wide.float()), wide

    parts: dict[str, nn.Module] = {"up": nn.Linear(8, 8), "down": nn.Linear(8, 4)}
    return Case(Wrap(forward, **parts), (torch.randn(4, 8),), trains(square))


def float64_model() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return Case(model, (torch.randn(4, 8, dtype=torch.float64),), trains(lambda y: y.sum()))


def integer_outputs() -> Case:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x)
        return {
            "value": hidden,
            "index": torch.arange(4) + (x[:, :4] > 0).long().argmax(-1, keepdim=True),
            "count": (x > 0).sum(-1, dtype=torch.int32),
            "mask": x > 0,
        }

    return Case(Wrap(forward, inner=nn.Linear(8, 4)), (torch.randn(4, 8),), trains(square))


def in_place() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.relu_()
        hidden = hidden + 1
        hidden[:, 0] = 0
        hidden.mul_(2).clamp_(max=3)
        out: Tensor = self.down(hidden)
        return out

    parts: dict[str, nn.Module] = {"up": nn.Linear(8, 8), "down": nn.Linear(8, 4)}
    return Case(Wrap(forward, **parts), (torch.randn(4, 8),), trains(square))


def input_written_in_place() -> Case:
    def forward(self: Any, x: Tensor, scratch: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        scratch.copy_(out.detach().t())
        return out

    model = Wrap(forward, inner=nn.Linear(8, 4))
    return Case(model, (torch.randn(3, 8), torch.zeros(4, 3)), trains(square))


def views_as_outputs() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.inner(x)
        return hidden, hidden.t(), hidden[:, ::2], hidden.view(2, 2, 8).transpose(0, 2), x.t()

    return Case(Wrap(forward, inner=nn.Linear(8, 8)), (torch.randn(4, 8),), trains(square))


def dict_outputs() -> Case:
    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        hidden = self.inner(x)
        return {"logits": hidden, "parts": [hidden * 2, {"sum": hidden.sum()}], "none": None}

    return Case(Wrap(forward, inner=nn.Linear(8, 4)), (torch.randn(4, 8),), trains(square))


def checkpoint_with_dropout() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = checkpoint(self.block, x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        return self.out(hidden), hidden == 0

    block = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5))
    parts: dict[str, nn.Module] = {"block": block, "out": nn.Linear(32, 4)}
    return Case(Wrap(forward, **parts), (torch.randn(4, 8),), trains(square))


def dropout_masks() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one = F.dropout(self.one(x), 0.3)
        other = F.dropout(torch.exp(one), 0.5)
        return self.two(other), torch.stack([one == 0, other == 0])

    parts: dict[str, nn.Module] = {"one": nn.Linear(8, 16), "two": nn.Linear(16, 4)}
    return Case(Wrap(forward, **parts), (torch.randn(4, 8),), trains(square))


def noise_in_the_model() -> Case:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(x)
        draw = torch.rand_like(hidden)
        return hidden + 0.1 * torch.randn_like(hidden), draw

    return Case(Wrap(forward, inner=nn.Linear(8, 8)), (torch.randn(4, 8),), trains(square))


def tied_weights() -> Case:
    return Case(TinyGPT(16, 2, 1), (torch.randint(64, (2, 8)),), trains(square))


def frozen_parameters() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return Case(model, (torch.randn(4, 8),), trains(square))


def hooks_on_parameters() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return Case(model, (torch.randn(4, 8),), doubled_gradient)


def doubled_gradient(model: nn.Module) -> Step:
    """A hook sees the true gradient in fp32 and changes it."""
    seen: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    next(model.parameters()).register_hook(double)

    def step(x: Tensor) -> list[Tensor]:
        model(x).square().mean().backward()
        return seen

    return step


def several_losses() -> Case:
    def build(model: nn.Module) -> Step:
        def step(x: Tensor) -> list[Tensor]:
            first = model(x).square().mean()
            first.backward()
            second = F.l1_loss(model(x * 2), x[:, :4])
            second.backward()
            return [first.detach(), second.detach()]

        return step

    return Case(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), rows(), build)


def rows() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8),)


def accumulation() -> Case:
    """Gradients of several steps add up in fp32."""
    return Case(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), rows(), trains(square), num_steps=4)


def gradients_set_to_zero() -> Case:
    def build(model: nn.Module) -> Step:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            opt.zero_grad(set_to_none=False)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    return Case(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rows(), build, num_steps=3)


def gradient_of_the_input() -> Case:
    def build(model: nn.Module) -> Step:
        def step(x: Tensor) -> Any:
            model(x.t()).square().sum().backward()
            return x.grad

        return step

    return Case(nn.Linear(4, 4), (torch.randn(4, 8, requires_grad=True),), build)


CASES = (
    mlp,
    convnet_channels_last,
    convnet_contiguous,
    attention,
    attention_written_out,
    embedding,
    recurrent_cell,
    fourier,
    complex_parameters,
    float64_inside,
    float64_model,
    integer_outputs,
    in_place,
    input_written_in_place,
    views_as_outputs,
    dict_outputs,
    checkpoint_with_dropout,
    dropout_masks,
    noise_in_the_model,
    tied_weights,
    frozen_parameters,
    hooks_on_parameters,
    several_losses,
    accumulation,
    gradients_set_to_zero,
    gradient_of_the_input,
)
# The gradient through batch statistics is a small difference: autocast's is as far off.
TOLERANCES = {convnet_channels_last: 0.1}
UNCAST = {float64_model}  # nothing in fp32, hence nothing to cast


def run(case: Callable[[], Case], compiled: bool, **options: object) -> tuple[Visible, Any]:
    """Run a case from a fixed start; return all that is visible afterwards, and the step."""
    torch.manual_seed(0)
    built = case()
    step = built.step(built.model)
    function = compile_step(step, **options) if compiled else step
    torch.manual_seed(1)
    visible: Visible = {}
    for index in range(built.num_steps):
        outputs = function(*built.inputs)
        visible[f"outputs {index}"] = snapshot(outputs)
    visible["gradients"] = snapshot([p.grad for p in built.model.parameters()])
    visible["parameters"] = snapshot(list(built.model.parameters()))
    visible["buffers"] = snapshot(list(built.model.buffers()))
    visible["inputs"] = snapshot(list(built.inputs))
    visible["random state"] = torch.get_rng_state()
    return visible, function


def snapshot(tree: Any) -> Any:
    """Copy every tensor with its strides."""

    def keep(tensor: Tensor) -> Tensor:
        kept = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return kept.copy_(tensor.detach())

    return pytree.tree_map_only(Tensor, keep, tree)


def layout(tree: Any) -> Any:
    """What is visible of every tensor but its values."""
    return pytree.tree_map_only(
        Tensor, lambda t: (t.dtype, tuple(t.shape), t.stride(), t.device.type), tree
    )


def assert_close(found: Visible, expected: Visible, tolerance: float) -> None:
    assert layout(found) == layout(expected)
    for (path, one), other in zip(
        pytree.tree_leaves_with_path(found), pytree.tree_leaves(expected), strict=True
    ):
        if not isinstance(one, Tensor):
            assert one == other
        elif not (one.is_floating_point() or one.is_complex()):
            assert torch.equal(one, other), pytree.keystr(path)
        else:
            distance = (one - other).norm() / other.norm().clamp_min(1e-6)
            assert distance <= tolerance, f"{pytree.keystr(path)}: {distance:.4f}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_visible_is_as_in_eager_fp32(case: Callable[[], Case]) -> None:
    expected, _ = run(case, compiled=False)
    found, compiled = run(case, compiled=True)
    assert_close(found, expected, TOLERANCES.get(case, TOLERANCE))
    casts = [cast for region in last_report(compiled).regions for cast in region.casts]
    assert bool(casts) is (case not in UNCAST)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everything_is_bitwise_as_in_eager_if_nothing_is_cast(case: Callable[[], Case]) -> None:
    expected, _ = run(case, compiled=False)
    found, _ = run(case, compiled=True, dtype="float32")
    assert_close(found, expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["autocast-cuda", "autocast-cpu"])
@pytest.mark.parametrize(
    "case",
    [convnet_channels_last, fourier, checkpoint_with_dropout, views_as_outputs, tied_weights],
    ids=lambda case: case.__name__,
)
def test_autocast_tables_change_nothing_visible_either(
    case: Callable[[], Case], table: str
) -> None:
    expected, _ = run(case, compiled=False)
    found, _ = run(case, compiled=True, table=table)
    assert_close(found, expected, TOLERANCES.get(case, TOLERANCE))


def test_compiled_module_with_eager_loss_and_optimizer_trains() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = copy.deepcopy(plain)
    compiled = compile_step(model)
    x, losses = torch.randn(16, 8), []
    for module, owner in ((plain, plain), (compiled, model)):
        opt = torch.optim.AdamW(owner.parameters(), lr=1e-2)
        for _ in range(5):
            outputs = module(x)
            assert outputs.dtype is torch.float32
            loss = F.mse_loss(outputs, x[:, :4])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(owner.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-2)
    assert losses[-1] < losses[5]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(value.dtype is torch.float32 for value in model.state_dict().values())
    assert last_report(compiled).regions[0].ops_after.half_share() == 1


def test_compiled_module_evaluates_in_16_bits_with_fp32_outputs() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    compiled = compile_step(model)
    x = torch.randn(16, 8)
    with torch.no_grad():
        found, expected = compiled(x), model(x)
    assert found.dtype is torch.float32
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    assert not torch.equal(found, expected)


def test_optimizer_state_is_fp32_and_loads_into_stock_pytorch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    opt = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    compiled = compile_step(step)
    for _ in range(2):
        compiled(torch.randn(4, 8))
    state = opt.state_dict()
    floats = [leaf for leaf in pytree.tree_leaves(state["state"]) if isinstance(leaf, Tensor)]
    assert {leaf.dtype for leaf in floats} == {torch.float32}
    other = torch.optim.AdamW(nn.Linear(8, 4).parameters())
    other.load_state_dict(state)
    assert other.state_dict()["state"][0]["step"] == 2
