"""The parity oracle: with ``table="autocast-cpu"`` the rewritten graphs are what autocast runs.

Not close, equal: loss and every gradient to the last bit. Two things are left out: the update,
since Dynamo's own capture of an optimizer rounds bias corrections otherwise than eager does, with
any backend; and dropout, which is scaled in fp32 here and by a factor rounded to 16 bits there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.steps import compile_step

Build = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]


def _image() -> Tensor:
    return torch.randn(4, 3, 8, 8)


class Block(nn.Module):
    """A pre-norm transformer block with fused qkv and causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, 2, width // 2)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + inner


class Rotary(nn.Module):
    """A value that is read twice in different dtypes: its gradients are added in its own."""

    angle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.register_buffer("angle", torch.rand(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        first, second = query.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        logits: Tensor = self.head(query * self.angle.cos() + turned * self.angle.sin())
        return logits


def _mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    return model, lambda m: F.cross_entropy(m(x), y)


def _norms() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 8))
    return model, lambda m: F.mse_loss(m(x), y)


def _convolutions() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = _image(), torch.randint(0, 5, (4,))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return model, lambda m: F.cross_entropy(m(x), y)


def _channels_last() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model, _ = _convolutions()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub
    x, y = _image().to(memory_format=torch.channels_last), torch.randint(0, 5, (4,))
    return model, lambda m: F.cross_entropy(m(x), y)


def _transformer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = torch.randint(0, 32, (2, 12))
    model = nn.Sequential(nn.Embedding(32, 16), Block(16), Block(16), nn.Linear(16, 32))
    return model, lambda m: F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())


def _rotary() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x, y = torch.randn(5, 6, 8), torch.randint(0, 4, (5, 6))
    return Rotary(), lambda m: F.cross_entropy(m(x).flatten(0, 1), y.flatten())


def _products() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(3, 5, 8)
    model = nn.Linear(8, 8)

    def loss(m: nn.Module) -> Tensor:
        h: Tensor = m(x)
        scores = (h @ h.transpose(1, 2) / 8**0.5).softmax(-1)
        mixed: Tensor = torch.einsum("bij,bjd->bid", scores, h).pow(2).mean()
        return mixed + h.sigmoid().sum()

    return model, loss


BUILDS: dict[str, Build] = {
    "mlp": _mlp,
    "norms": _norms,
    "convolutions": _convolutions,
    "channels last": _channels_last,
    "transformer": _transformer,
    "rotary": _rotary,
    "products": _products,
}


def _run(build: Build, as_autocast: bool) -> list[Tensor]:
    """Return the loss and the gradients, of autocast or of ours."""
    torch.manual_seed(0)
    model, loss_of = build()
    torch.manual_seed(1)
    if as_autocast:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
    else:
        compiled = compile_step(lambda: loss_of(model), table="autocast-cpu")
        loss = compiled()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach().float(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", BUILDS)
def test_loss_and_gradients_equal_those_of_autocast(name: str) -> None:
    theirs = _run(BUILDS[name], as_autocast=True)
    ours = _run(BUILDS[name], as_autocast=False)
    assert len(theirs) == len(ours) > 1
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
