"""Train a byte-level GPT on the source code of Python's standard library, in 16 bits.

The step is plain fp32 PyTorch; ``torch.compile(step, backend="mpcompile")`` does the rest. The same
run in fp32 through stock torch.compile follows, and a table and a plot put the two side by side::

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 2000 --layers 6 --width 256 --heads 8 --device cuda
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import mpcompile
from mpcompile.errors import ConfigError

# Tests are not typical code; encodings and pydoc_data are generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}

Step = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T", str, int, float, bool)


def _option(default: T, description: str) -> T:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Settings:
    """The command line: each field is an option."""

    backend: str = _option("mpcompile", "torch.compile backend: mpcompile, inductor, eager, ...")
    dtype: str = _option("", "bfloat16 (mpcompile's default), float16 or float32 (all others)")
    lowering: str = _option("inductor", "what runs mpcompile's graphs: inductor or eager")
    device: str = _option("cpu", "cpu, cuda, cuda:1, ...")
    steps: int = _option(400, "training steps")
    batch_size: int = _option(16, "sequences a step")
    context: int = _option(128, "bytes a sequence")
    layers: int = _option(4, "transformer blocks")
    width: int = _option(192, "width of the residual stream; a multiple of 8 is fastest")
    heads: int = _option(6, "attention heads; width / heads is best a multiple of 8 too")
    lr: float = _option(3e-3, "peak learning rate")
    decay: float = _option(0.1, "weight decay of the matrices")
    eval_every: int = _option(100, "steps between validations")
    eval_batches: int = _option(10, "batches a validation")
    sample_bytes: int = _option(300, "bytes of text to generate at the end")
    seed: int = _option(0, "seed of weights and batches")
    compare: bool = _option(True, "train in fp32 too and compare")
    report: bool = _option(True, "print what mpcompile rewrote")
    output_dir: str = _option("out", "folder for the loss curves")

    @property
    def run_dtype(self) -> str:
        """The dtype of the matrix work; only mpcompile changes the one the step is written in."""
        return self.dtype or ("bfloat16" if self.backend == "mpcompile" else "float32")

    @property
    def warmup_steps(self) -> int:
        """Steps whose time does not count: compilation and recompilation happen there."""
        return min(10, self.steps // 2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width)
        self.out = nn.Linear(settings.width, settings.width)
        nn.init.zeros_(self.out.weight)  # each branch starts at nothing: deep models learn sooner

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(batch, length, width)``."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP four times as wide."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(settings.width), Attention(settings))
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, 4 * settings.width)
        self.down = nn.Linear(4 * settings.width, settings.width)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream."""
        x = x + self.attention(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


class GPT(nn.Module):
    """Decoder-only transformer over bytes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, 256, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits ``(batch, length, 256)`` for the byte after each position."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy of the next bytes ``y``, in nats per byte."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


def load_corpus() -> tuple[Tensor, Tensor]:
    """Read the standard library's source as bytes: training text, and each tenth file held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    held_out = bytearray().join(texts[::10])
    del texts[::10]
    text = bytearray().join(texts)
    return torch.frombuffer(text, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def sample_batch(text: Tensor, settings: Settings, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random windows: inputs and next bytes, both int64 ``(batch, context)``."""
    length = settings.context + 1
    starts = torch.randint(len(text) - length, (settings.batch_size, 1), generator=rng)
    windows = text[starts + torch.arange(length)].to(settings.device, torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def build_optimizer(model: GPT, settings: Settings, fused: bool | None = None) -> Optimizer:
    """Return AdamW that decays matrices but not biases and norm weights."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=fused)


def build_schedule(opt: Optimizer, steps: int) -> LambdaLR:
    """Return a linear warm-up over 5 % of the steps, then a cosine down to a tenth of the peak."""
    warmup = steps // 20 + 1

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))

    return LambdaLR(opt, factor)


def build_step(model: GPT, opt: Optimizer) -> Step:
    """Return the training step: plain fp32 PyTorch."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model.loss(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@dataclass
class Run:
    """What a training run left behind; times in seconds, one a step."""

    name: str
    losses: list[float]
    validation: dict[int, float]
    times: list[float]
    peak_bytes: int
    sample: str
    report: str


def train(corpus: tuple[Tensor, Tensor], settings: Settings, backend: str, dtype: str) -> Run:
    """Train a model from the seed: equal seeds give equal weights and equal batches."""
    torch.compiler.reset()
    torch.manual_seed(settings.seed)
    model = GPT(settings).to(settings.device)
    opt = build_optimizer(model, settings)
    schedule = build_schedule(opt, settings.steps)
    chosen: dict[str, Any] = {"backend": backend}
    if backend == "mpcompile":
        chosen["options"] = {"dtype": dtype, "lowering": settings.lowering}
    step: Step = torch.compile(build_step(model, opt), **chosen)
    evaluate: Step = torch.compile(model.loss, **chosen)

    run = Run(f"{backend} {dtype}", [], {}, [], 0, "", "")
    generator = torch.Generator().manual_seed(settings.seed)
    losses: list[Tensor] = []
    progress = tqdm(range(1, settings.steps + 1), desc=run.name, unit="step")
    for index in progress:
        x, y = sample_batch(corpus[0], settings, generator)
        if index == settings.warmup_steps + 1:
            loss, run.peak_bytes = measure_peak_bytes(step, x, y)
        else:
            loss, seconds = measure_seconds(step, x, y)
            run.times.append(seconds)
        schedule.step()
        losses.append(loss)
        if index % settings.eval_every == 0 or index == settings.steps:
            run.validation[index] = validation_loss(evaluate, model, corpus[1], settings)
            progress.set_postfix(loss=f"{loss:.3f}", validation=f"{run.validation[index]:.3f}")
    run.losses = torch.stack(losses).tolist()
    run.sample = generate(model, settings)
    run.report = str(mpcompile.last_report(step)) if backend == "mpcompile" else ""
    return run


@torch.no_grad()
def validation_loss(evaluate: Step, model: GPT, text: Tensor, settings: Settings) -> float:
    """Return the mean loss over held-out windows, the same ones at every call."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    batches = (sample_batch(text, settings, generator) for _ in range(settings.eval_batches))
    loss = statistics.fmean(evaluate(x, y).item() for x, y in batches)
    model.train()
    return loss


@torch.no_grad()
def generate(model: GPT, settings: Settings) -> str:
    """Continue a function definition byte by byte, at temperature 0.8."""
    model.eval()
    text = torch.tensor([list(b"\ndef ")], device=settings.device)
    for _ in range(settings.sample_bytes):
        logits = model(text[:, -settings.context :])[:, -1]
        following = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1)
        text = torch.cat((text, following), dim=1)
    return bytes(text[0].tolist()).decode("ascii", errors="backslashreplace").strip()


def measure_seconds(step: Step, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Run a step and return its loss and its time, the device's work included."""
    start = time.perf_counter()
    loss = step(x, y)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return loss, time.perf_counter() - start


def measure_peak_bytes(step: Step, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Run a step and return its loss and the most tensor memory it held above what lived before.

    On the CPU the profiler's allocations are summed up, as resident memory counts the compiler too.
    """
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        loss = step(x, y)
        return loss, torch.cuda.max_memory_allocated(x.device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = step(x, y)
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return loss, peak


def format_comparison(runs: Sequence[Run], settings: Settings) -> str:
    """Lay the runs out side by side, with the first over the second as the last column."""
    warmup, last = settings.warmup_steps, settings.steps // 20 + 1
    tokens = settings.batch_size * settings.context
    step_s = [statistics.median(run.times[warmup:]) for run in runs]
    warmup_s = [sum(run.times[:warmup]) for run in runs]
    rows = {
        f"training loss, nats/byte, mean of the last {last} steps": [
            statistics.fmean(run.losses[-last:]) for run in runs
        ],
        "validation loss, nats/byte": [run.validation[settings.steps] for run in runs],
        "tokens/s, median step after warm-up": [tokens / s for s in step_s],
        f"compile time, s (the first {warmup} steps less their steady time)": [
            total - warmup * s for total, s in zip(warmup_s, step_s, strict=True)
        ],
        "peak memory of a step, MiB above its start": [run.peak_bytes / 2**20 for run in runs],
    }
    headers = ["", *(run.name for run in runs)]
    if len(runs) == 2:
        headers.append("ratio")
        rows = {name: [*pair, pair[0] / pair[1]] for name, pair in rows.items()}
    return tabulate([[name, *values] for name, values in rows.items()], headers, floatfmt=".4g")


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses of all runs over each other."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(title="Training (lines), validation (dots)", xlabel="step")
    axes.set_ylabel("loss, nats per byte")
    for run, colour, wide in zip(runs, ("tab:orange", "tab:blue"), (3.0, 0.8), strict=False):
        axes.plot(range(1, len(run.losses) + 1), run.losses, colour, lw=wide, label=run.name)
        axes.plot(*zip(*run.validation.items(), strict=True), "o", color=colour, ms=5 + 2 * wide)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_settings(argv: Sequence[str] | None) -> Settings:
    """Read the command line; a wrong value ends the program with what to write instead."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option in fields(Settings):
        kind: dict[str, Any] = {"type": type(option.default)}
        if isinstance(option.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        flag = "--" + option.name.replace("_", "-")
        parser.add_argument(flag, default=option.default, help=option.metadata["help"], **kind)
    settings = Settings(**vars(parser.parse_args(argv)))
    if mistake := find_mistake(settings):
        parser.error(mistake)
    return settings


def find_mistake(settings: Settings) -> str | None:
    """Return what is wrong with the settings and what to do, or None."""
    if settings.steps < 3:
        return "--steps must be at least 3: one to compile, one for its memory, one for its time"
    if settings.width % settings.heads:
        return f"--width {settings.width} must be a multiple of --heads {settings.heads}"
    if settings.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        return f"--backend {settings.backend} is not one of {known}"
    if settings.backend != "mpcompile" and settings.run_dtype != "float32":
        return f"--backend {settings.backend} computes in float32, as written: leave --dtype out"
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU; use cpu, or install a CUDA build of torch"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Train, generate, report and compare."""
    settings = parse_settings(argv)
    corpus = load_corpus()
    print(
        f"torch {torch.__version__} on {settings.device}, {torch.get_num_threads()} threads; "
        f"{len(corpus[0]) / 1e6:.1f} MB of Python source, {len(corpus[1]) / 1e6:.1f} MB held out; "
        f"{sum(p.numel() for p in GPT(settings).parameters()) / 1e6:.2f} M parameters"
    )
    plain = "inductor" if settings.lowering == "inductor" else "aot_eager"
    torch.compile(torch.sin, backend=plain)(torch.ones(8))  # starts the compiler, for neither run
    runs = [train(corpus, settings, settings.backend, settings.run_dtype)]
    if settings.compare and (settings.backend, settings.run_dtype) != (plain, "float32"):
        runs.append(train(corpus, settings, plain, "float32"))
    if settings.report and runs[0].report:
        print(f"\nWhat mpcompile rewrote\n\n{runs[0].report}")
    print(f"\nText from the {runs[0].name} model\n\n{runs[0].sample}\n")
    print(format_comparison(runs, settings))
    curves = Path(settings.output_dir) / "train_gpt.png"
    plot_losses(runs, curves)
    print(f"\nLoss curves: {curves}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConfigError as error:
        raise SystemExit(f"train_gpt.py: {error}") from None
