"""Train a convnet with BatchNorm on scikit-learn's handwritten digits, in 16 bits and in fp32.

The step is plain fp32 PyTorch; ``torch.compile(step, backend="mpcompile")`` does the rest. What is
saved stays fp32: the table lists the dtypes of the state dict::

    python examples/train_digits.py
    python examples/train_digits.py --epochs 5 --require-accuracy 0.97
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mpcompile
from mpcompile.errors import ConfigError

WARMUP_STEPS = 5  # compilation and recompilation happen here

Step = Callable[[Tensor, Tensor], Tensor]


def load_images(device: str) -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 digits to train on and 360 to test on, 8 x 8 pixels in [0, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    """Return a small VGG: three convolutions with BatchNorm, then a classifier with dropout."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 2 * 2, 10),
    )


def build_step(model: nn.Module, opt: torch.optim.Optimizer) -> Step:
    """Return the training step: plain fp32 PyTorch."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@dataclass
class Run:
    """What a training run left behind; times in seconds."""

    name: str
    loss: float
    accuracy: float
    times: list[float]
    state_dtypes: str
    report: str


def train(arguments: argparse.Namespace, backend: str, dtype: str) -> Run:
    """Train a model from the seed and test it."""
    torch.compiler.reset()
    torch.manual_seed(arguments.seed)
    training_set, test_set = load_images(arguments.device)
    model = build_model().to(arguments.device)
    opt = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = CosineAnnealingLR(opt, arguments.epochs)
    chosen: dict[str, Any] = {"backend": backend}
    if backend == "mpcompile":
        chosen["options"] = {"dtype": dtype, "lowering": arguments.lowering}
    step: Step = torch.compile(build_step(model, opt), **chosen)
    predict = torch.compile(model, **chosen)

    run = Run(f"{backend} {dtype}", 0.0, 0.0, [], "", "")
    batches = DataLoader(training_set, arguments.batch_size, shuffle=True, drop_last=True)
    progress = tqdm(range(arguments.epochs), desc=run.name, unit="epoch")
    for _ in progress:
        losses = []
        for images, labels in batches:
            start = time.perf_counter()
            losses.append(step(images, labels).item())
            run.times.append(time.perf_counter() - start)
        schedule.step()
        run.loss = statistics.fmean(losses)
        run.accuracy = measure_accuracy(model, predict, test_set)
        progress.set_postfix(loss=f"{run.loss:.4f}", accuracy=f"{run.accuracy:.2%}")
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in model.state_dict().values())
    run.state_dtypes = ", ".join(f"{count} {name}" for name, count in dtypes.items())
    run.report = str(mpcompile.last_report(step)) if backend == "mpcompile" else ""
    return run


@torch.no_grad()
def measure_accuracy(
    model: nn.Module, predict: Callable[[Tensor], Tensor], test_set: TensorDataset
) -> float:
    """Return the fraction of test digits that are recognised, with BatchNorm's running means."""
    model.eval()
    images, labels = test_set.tensors
    accuracy = (predict(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return accuracy


def format_comparison(runs: Sequence[Run]) -> str:
    """Lay the runs out side by side."""
    step_ms = [1e3 * statistics.median(run.times[WARMUP_STEPS:]) for run in runs]
    warmup_s = [sum(run.times[:WARMUP_STEPS]) for run in runs]
    rows = [
        ["training loss, last epoch", *(f"{run.loss:.4f}" for run in runs)],
        ["test accuracy", *(f"{run.accuracy:.2%}" for run in runs)],
        ["step, ms, median after warm-up", *(f"{value:.2f}" for value in step_ms)],
        [f"first {WARMUP_STEPS} steps, s, with compilation", *(f"{s:.1f}" for s in warmup_s)],
        ["tensors in the state dict", *(run.state_dtypes for run in runs)],
    ]
    headers = ["", *(run.name for run in runs)]
    return tabulate(rows, headers, disable_numparse=True, colalign=["left"] + ["right"] * len(runs))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong value ends the program with what to write instead."""
    parser = argparse.ArgumentParser(
        description="Train a convnet with BatchNorm on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", default="mpcompile", help="mpcompile, inductor, aot_eager, eager, ...")
    add("--dtype", help="bfloat16 (mpcompile's default), float16 or float32 (all others)")
    add("--lowering", default="inductor", help="what runs mpcompile's graphs: inductor or eager")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--epochs", type=int, default=8, help="passes over the training images")
    add("--batch-size", type=int, default=96, help="images a step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="seed of weights, batches and dropout")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="train in fp32 too")
    add("--report", action="store_true", help="print what mpcompile rewrote")
    add("--require-accuracy", type=float, help="exit with 1 below this, e.g. 0.97")
    arguments = parser.parse_args(argv)
    if arguments.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        parser.error(f"--backend {arguments.backend} is not one of {known}")
    natural = "bfloat16" if arguments.backend == "mpcompile" else "float32"
    arguments.dtype = arguments.dtype or natural
    if arguments.backend != "mpcompile" and arguments.dtype != natural:
        parser.error(f"--backend {arguments.backend} computes in float32: leave --dtype out")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch finds no GPU; use --device cpu, or a CUDA build of torch"
        )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, and judge the accuracy if asked to."""
    arguments = parse_arguments(argv)
    runs = [train(arguments, arguments.backend, arguments.dtype)]
    plain = "inductor" if arguments.lowering == "inductor" else "aot_eager"
    if arguments.compare and runs[0].name != f"{plain} float32":
        runs.append(train(arguments, plain, "float32"))
    if arguments.report and runs[0].report:
        print(f"\nWhat mpcompile rewrote\n\n{runs[0].report}")
    print(f"\n{format_comparison(runs)}")
    accuracy, required = runs[0].accuracy, arguments.require_accuracy
    if required is not None and accuracy < required:
        print(f"\nTest accuracy {accuracy:.2%} is below the {required:.2%} asked for.")
        return 1
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConfigError as error:
        raise SystemExit(f"train_digits.py: {error}") from None
