"""Training steps for tests, and how to compare a compiled one with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.report import RegionReport

Step = Callable[..., Any]


def compile_step(step: Any, **options: object) -> Any:
    """Compile with this backend, by default with eager lowering."""
    given: dict[str, Any] = {"lowering": "eager", **options}
    return torch.compile(step, backend="mpcompile", options=given)


def training_region(compiled: Any) -> RegionReport:
    """Return the one region that holds forward and backward."""
    (region,) = (r for r in last_report(compiled).regions if r.kind is GraphKind.TRAINING)
    return region


class Classifier(nn.Module):
    """A norm, two linear layers: the smallest model with 16-bit and fp32 work."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.readout = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.readout(F.gelu(self.norm(self.read_in(x))))
        return logits


def classifier_step(seed: int = 0) -> tuple[nn.Module, Step]:
    """Return a model and a plain step over ``(x, labels)`` that zeroes gradients last.

    SGD: AdamW of stock ``torch.compile`` already rounds differently from eager, being traced as
    ``capturable``.
    """
    torch.manual_seed(seed)
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, step


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    """Return ``(x, labels)`` that fit the classifier, the same every time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 16, generator=generator)
    return x, torch.randint(8, (rows,), generator=generator)


class Attention(nn.Module):
    """Causal attention over ``(rows, length, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class TinyGPT(nn.Module):
    """A byte-level transformer with tied embeddings."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": Attention(width, heads),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width),
                        nn.Linear(width, 4 * width),
                        nn.GELU(),
                        nn.Linear(4 * width, width),
                    ),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["attention"](block["norm"](x))
            x = x + block["mlp"](x)
        logits: Tensor = self.head(self.norm(x))
        return logits
