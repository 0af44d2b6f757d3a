"""The training programs that are measured against each other: one GPT, one optimizer, in all ways.

Every row starts from the same weights and sees the same batches. The peer is what a user of stock
PyTorch would write today for speed: autocast, foreach clipping and fused AdamW under Inductor.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.train_gpt import GPT, Settings, Step, build_optimizer, sample_batch


@dataclass(frozen=True)
class Row:
    """One way to train: how the step is written and what compiles it (None: nothing).

    With ``zero_first`` gradients are cleared before forward and stay visible after the step.
    """

    name: str
    backend: str | None = None
    autocast: bool = False
    zero_first: bool = False
    options: dict[str, Any] = field(default_factory=dict)


PEER = "inductor-autocast"
ROWS = {
    "eager-fp32": Row("eager fp32"),
    "inductor-fp32": Row("Inductor fp32", "inductor"),
    PEER: Row("Inductor + autocast bf16, foreach clip, fused AdamW", "inductor", autocast=True),
    "mpcompile": Row("mpcompile bf16, whole step", "mpcompile"),
    "mpcompile-zero-first": Row(
        "mpcompile bf16, whole step, zero_grad first", "mpcompile", zero_first=True
    ),
    "mpcompile-drop": Row(
        "mpcompile bf16, whole step, zero_grad first, grads dropped",
        "mpcompile",
        zero_first=True,
        options={"grads": "drop"},
    ),
    "mpcompile-regions": Row(
        "mpcompile bf16, regions", "mpcompile", options={"capture": "regions"}
    ),
}


@dataclass
class Program:
    """A row made ready to run.

    Attributes:
        model: fp32, on the device.
        step: forward, backward, clipping, update, zero_grad.
        forward_backward: forward and backward alone; leaves gradients.
        batches: endless, the same for every row.
    """

    model: GPT
    step: Step
    forward_backward: Step
    batches: Iterator[tuple[Tensor, Tensor]]


def build_program(row: Row, settings: Settings, text: Tensor) -> Program:
    """Build model, optimizer and both compiled functions of a row."""
    torch.manual_seed(settings.seed)
    model = GPT(settings).to(settings.device)
    opt = build_optimizer(model, settings, fused=row.autocast or None)
    foreach = True if row.autocast else None

    def precision() -> AbstractContextManager[Any]:
        if row.autocast:
            return torch.autocast(torch.device(settings.device).type, torch.bfloat16)
        return nullcontext()

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        with precision():
            loss = model.loss(x, y)
        loss.backward()
        return loss.detach()

    def step(x: Tensor, y: Tensor) -> Tensor:
        if row.zero_first:
            opt.zero_grad(set_to_none=True)
        with precision():
            loss = model.loss(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        opt.step()
        if not row.zero_first:
            opt.zero_grad(set_to_none=True)
        return loss.detach()

    batches = _draw_batches(text, settings)
    if row.backend is None:
        return Program(model, step, forward_backward, batches)
    chosen: dict[str, Any] = {"backend": row.backend, "options": row.options or None}
    return Program(
        model,
        torch.compile(step, **chosen),
        torch.compile(forward_backward, **chosen),
        batches,
    )


def _draw_batches(text: Tensor, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(settings.seed)
    while True:
        yield sample_batch(text, settings, rng)


def describe_machine(device: str) -> str:
    """Return processor, threads, versions: what a figure means nothing without."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    parts = [
        processor,
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
        platform.system(),
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    if torch.device(device).type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join(parts)
