"""Train on several ranks with stock DistributedDataParallel; gradients travel in 16 bits.

``torchrun`` starts the ranks; Gloo connects CPUs, NCCL GPUs. A checkpoint is written after every
epoch, with what mpcompile keeps between steps (the loss scale of float16, what error feedback owes
on each rank), and a run that is started again with ``--resume`` goes on from it, as one that never
stopped::

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --wire-dtype float16 --epochs 12 --resume
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpcompile

Step = Callable[[Tensor, Tensor], Tensor]


def load_images(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """Return 1,500 digits to train on and 297 to test on, 64 pixels in [0, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def build_model() -> nn.Module:
    """Return a perceptron of 300,000 parameters."""
    return nn.Sequential(
        nn.Linear(64, 512),
        nn.LayerNorm(512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.GELU(),
        nn.Linear(512, 10),
    )


def build_step(model: nn.Module, opt: torch.optim.Optimizer) -> Step:
    """Return the training step: plain fp32 PyTorch, as for one rank."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def save(path: Path, model: nn.Module, opt: torch.optim.Optimizer, step: Step, epoch: int) -> None:
    """Write a checkpoint from rank 0; a run that is killed meanwhile leaves the old one whole."""
    steps = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mpcompile.state_dict(step), steps)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}
        torch.save({**state, "steps": steps}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def resume(
    path: Path, model: nn.Module, opt: torch.optim.Optimizer, step: Step, device: torch.device
) -> int:
    """Load a checkpoint on every rank and return how many epochs it has seen."""
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    steps = state["steps"]  # ranks that are new take the loss scale of the first
    mpcompile.load_state_dict(step, steps[dist.get_rank() if dist.get_rank() < len(steps) else 0])
    return int(state["epoch"])


@torch.no_grad()
def measure_accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Return the fraction of test digits that are recognised."""
    images, labels = test_set.tensors
    accuracy: float = (model(images).argmax(dim=1) == labels).float().mean().item()
    return accuracy


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train on this rank's share of every epoch; rank 0 tells how it goes."""
    torch.manual_seed(0)
    training_set, test_set = load_images(device)
    net = build_model().to(device)
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    step: Step = torch.compile(
        build_step(model, opt),
        backend="mpcompile",
        options={
            "dtype": arguments.dtype,
            "wire_dtype": arguments.wire_dtype,
            "error_feedback": arguments.error_feedback,
            "lowering": arguments.lowering,
        },
    )
    first = resume(arguments.checkpoint, net, opt, step, device) if arguments.resume else 0
    sampler: DistributedSampler[Tensor] = DistributedSampler(training_set, drop_last=True)
    batches = DataLoader(training_set, arguments.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        losses = [step(images, labels) for images, labels in batches]
        save(arguments.checkpoint, net, opt, step, epoch + 1)
        if dist.get_rank() == 0:
            loss = torch.stack(losses).mean().item()
            accuracy = measure_accuracy(net, test_set)
            print(f"epoch {epoch + 1}: loss {loss:.6f}, test accuracy {accuracy:.2%}", flush=True)
    if dist.get_rank() == 0 and first < arguments.epochs:
        print_wire(step)


def print_wire(step: Step) -> None:
    """Tell what went over the wire."""
    for sync in mpcompile.last_report(step).syncs:
        mib = sync.bytes_a_step / 2**20
        print(
            f"gradients went as {sync.wire}: {mib:.2f} MiB a step and rank, "
            f"{sync.bytes_a_parameter:.2f} bytes a parameter"
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train on several ranks; start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dtype", default="bfloat16", help="dtype that the step computes in")
    add("--wire-dtype", default="float16", help="dtype of gradients between ranks")
    add("--error-feedback", action="store_true", help="keep what the cast to it rounds off")
    add("--lowering", default="inductor", help="what runs mpcompile's graphs: inductor or eager")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--epochs", type=int, default=6, help="passes over the training images")
    add("--batch-size", type=int, default=50, help="images a step and rank")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--checkpoint", type=Path, default=Path("out/train_ddp.pt"), help="where it is written")
    add("--resume", action="store_true", help="go on from the checkpoint")
    arguments = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 examples/train_ddp.py")
    if arguments.resume and not arguments.checkpoint.exists():
        parser.error(f"--resume: there is no {arguments.checkpoint}; leave --resume out")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Join the group that torchrun describes, train, leave it."""
    arguments = parse_arguments(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
