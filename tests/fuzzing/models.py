"""Random small models over vectors, sequences and images."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.steps import Attention

WIDTH = 8
CLASSES = 4


class Apply(nn.Module):
    """A function of the input as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Gate(nn.Module):
    """Scales and shifts by parameters of its own, in place, and counts its calls."""

    seen: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return (x * self.scale).add_(self.shift)


class Twice(nn.Module):
    """Applies one layer twice: its gradient is a sum."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(self.inner(x)))
        return out


class Checkpointed(nn.Module):
    """Has its layer computed again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Square(torch.autograd.Function):
    """A square whose gradient a user wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Head(nn.Module):
    """Mean over all but rows and features, then classes."""

    def __init__(self, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        if x.dim() == 3:
            x = x.mean(1)
        out: Tensor = self.out(x)
        return out if self.tied is None else out + x @ self.tied[:WIDTH, :CLASSES]


def _square(x: Tensor) -> Tensor:
    out: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return out


def _half_and_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second * torch.sigmoid(first), first], dim=-1)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[..., 0] = y[..., 1] - 1
    y[..., 2:5].mul_(0.5)
    return y


def _masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, 0.5) + torch.where(x < -1, x * 0.1, x)


@torch.no_grad()
def _scale_of(x: Tensor) -> Tensor:
    return 1 / (1 + x.abs().mean())


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x * 1, inplace=True),
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1) * 3,
    "square": lambda x: _square(x.clamp(-2, 2)),
    "chunk": _half_and_half,
    "in_place": _in_place,
    "masked": _masked,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-1) * 0.3,
    "sort": lambda x: x.sort(-1).values,
    "flip": lambda x: x.flip(-1) + x.roll(1, 0),
    "topk": lambda x: x + x.topk(2, dim=-1).values.sum(-1, keepdim=True),
    "detached": lambda x: x - x.detach().mean(),
    "straight_through": lambda x: x + (x.round() - x).detach(),
    "view": lambda x: x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2),
    "einsum": lambda x: torch.einsum("...i,...j->...j", x, x) * 0.2,
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "no_grad": lambda x: x * _scale_of(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


def _anywhere(rng: Random) -> nn.Module:
    """Return a layer for any shape that ends with the width."""
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.Dropout(0.3),
        lambda: Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())),
        lambda: Gate((WIDTH,)),
        lambda: Twice(nn.Linear(WIDTH, WIDTH)),
        lambda: Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        *[lambda: Apply(_FUNCTIONS[rng.choice(sorted(_FUNCTIONS))])] * 7,
    ]
    return rng.choice(kinds)()


class Turned(nn.Module):
    """Applies a 1d layer, which wants features second."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return out


def _over_vectors(rng: Random) -> nn.Module:
    return nn.BatchNorm1d(WIDTH) if rng.random() < 0.15 else _anywhere(rng)


def _over_sequences(rng: Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: Residual(Attention(WIDTH, 2)),
        lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        lambda: Turned(nn.BatchNorm1d(WIDTH)),
        *[lambda: _anywhere(rng)] * 4,
    ]
    return rng.choice(kinds)()


def _over_images(rng: Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=rng.random() < 0.5),
        lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2),
        lambda: nn.BatchNorm2d(WIDTH),
        lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.MaxPool2d(3, stride=1, padding=1),
        lambda: nn.AvgPool2d(3, stride=1, padding=1),
        lambda: nn.Upsample(scale_factor=2, mode="nearest"),
        lambda: nn.AdaptiveAvgPool2d((4, 4)),
        lambda: nn.Dropout2d(0.2),
        lambda: Gate((WIDTH, 1, 1)),
        lambda: Residual(nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.SiLU())),
        lambda: Apply(rng.choice([lambda x: F.relu(x), torch.sigmoid, torch.tanh])),
    ]
    return rng.choice(kinds)()


def random_model(rng: Random) -> tuple[nn.Sequential, Callable[[int, int], Tensor]]:
    """Return a model, and what makes its input from the number of a call and of rows."""
    torch.manual_seed(rng.randrange(10**6))
    kind = rng.choice(["vectors", "tokens", "sequences", "images"])
    depth = rng.randint(1, 5)
    layers: list[nn.Module] = []
    tied: nn.Parameter | None = None
    if kind == "tokens":
        layers.append(nn.Embedding(16, WIDTH, padding_idx=rng.choice([None, 0])))
        tied = layers[0].weight if rng.random() < 0.5 else None  # type: ignore[assignment]
    if kind == "images":
        layers.append(nn.Conv2d(2, WIDTH, 3, padding=1))
    make = {"vectors": _over_vectors, "images": _over_images}.get(kind, _over_sequences)
    layers += [make(rng) for _ in range(depth)]
    model = nn.Sequential(*layers, Head(tied))
    if kind == "images" and rng.random() < 0.3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def inputs(call: int, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(call)
        if kind == "tokens":
            return torch.randint(16, (rows, 6), generator=generator)
        shapes = {"vectors": (rows, WIDTH), "sequences": (rows, 6, WIDTH)}
        return torch.randn(shapes.get(kind, (rows, 2, 4, 4)), generator=generator)

    return model, inputs
