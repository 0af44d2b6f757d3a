"""What the ranks of a test run: training with stock DDP or compiled, on batches of their own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile.backend import last_report

Build = Callable[["Job", int], "Training"]


@dataclass(frozen=True)
class Job:
    """One training run on every rank.

    Attributes:
        build: what is trained and how; one of the functions below.
        options: of the backend; None trains stock, eagerly.
        num_steps: how many steps.
        ddp: keyword arguments of DistributedDataParallel.
    """

    build: Build
    options: dict[str, object] | None = None
    num_steps: int = 4
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass
class Training:
    """A step, its modules, and a function from step number and rank to its arguments."""

    step: Callable[..., Any]
    modules: list[DistributedDataParallel]
    batch: Callable[[int, int], tuple[Any, ...]]
    around: Callable[[], Any] = contextlib.nullcontext


@dataclass
class Outcome:
    """What a rank ended with.

    Attributes:
        params: parameters by name, all modules together.
        buffers: buffers likewise.
        losses: what the step returned.
        report: of the compiled step.
        warned: texts of warnings of ours.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float]
    report: Any
    warned: list[str]


def train(rank: int, job: Job) -> Outcome:
    """Run ``job`` on this rank."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = job.build(job, rank)
        step = training.step
        if job.options is not None:
            options: dict[str, Any] = {"lowering": "eager", **job.options}
            step = torch.compile(step, backend="mpcompile", options=options)
        with training.around():
            losses = [float(step(*training.batch(number, rank))) for number in range(job.num_steps)]
    named = [
        (f"{i}.{n}", p) for i, m in enumerate(training.modules) for n, p in m.named_parameters()
    ]
    buffers = [
        (f"{i}.{n}", b) for i, m in enumerate(training.modules) for n, b in m.named_buffers()
    ]
    return Outcome(
        params={name: parameter.detach().clone() for name, parameter in named},
        buffers={name: buffer.clone() for name, buffer in buffers},
        losses=losses,
        report=None if job.options is None else last_report(step),
        warned=[str(w.message) for w in caught if "mpcompile" in str(w.message)],
    )


class Net(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.read_in = nn.Linear(12, width)
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.readout(F.gelu(self.norm(self.read_in(x))))
        return logits


def labelled(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a batch that differs between steps and ranks."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 12, generator=generator)
    return x, torch.randint(6, (8,), generator=generator)


def wrap(job: Job, module: nn.Module, **defaults: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{**defaults, **job.ddp})


def plain(job: Job, rank: int) -> Training:
    """Forward, backward, clipping, update."""
    model = wrap(job, Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], labelled)


def sequential(job: Job, rank: int) -> Training:
    """A module of torch inside the wrapper: no frame of the user's between them."""
    model = wrap(job, nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6)))
    return _simple(model, labelled)


def _simple(
    model: DistributedDataParallel, batch: Callable[[int, int], tuple[Any, ...]], lr: float = 0.2
) -> Training:
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step(x: Any, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], batch)


def accumulating(job: Job, rank: int) -> Training:
    """Two micro-batches, the first one without synchronisation."""
    model = wrap(job, Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with model.no_sync():
            F.cross_entropy(model(x[:4]), labels[:4]).backward()
        loss = F.cross_entropy(model(x[4:]), labels[4:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], labelled)


class Branching(Net):
    """A layer that only some steps of some ranks use, a frozen one, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(12, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.first = nn.Linear(24, 24, bias=False)
        self.second = nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        hidden = self.frozen(F.gelu(self.read_in(x)))
        if takes_branch:
            hidden = hidden + self.branch(x)
        logits: Tensor = self.readout(self.norm(self.second(torch.tanh(self.first(hidden)))))
        return logits


def branching(job: Job, rank: int) -> Training:
    """A branch that rank 0 takes in odd steps only."""
    model = wrap(job, Branching(), find_unused_parameters=True)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)

    def step(x: Tensor, labels: Tensor, takes_branch: bool) -> Tensor:
        loss = F.cross_entropy(model(x, takes_branch), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(number: int, rank: int) -> tuple[Any, ...]:
        return (*labelled(number, rank), number % 2 == 1 and rank == 0)

    return Training(step, [model], batch)


def tied_and_frozen(job: Job, rank: int) -> Training:
    """All parameters used but one frozen layer and one never used."""
    model = wrap(job, Branching())
    model.module.branch.requires_grad_(False)
    return _simple(model, labelled)


def static_unused(job: Job, rank: int) -> Training:
    """A static graph with a layer that is never used."""
    return _simple(wrap(job, Branching(), static_graph=True), labelled)


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(12, 24)
        self.wide = nn.Linear(24, 24).double()
        self.narrow = nn.Linear(24, 6).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(torch.tanh(self.single(x)).double())
        logits: Tensor = self.narrow(hidden.bfloat16()).float()
        return logits


def several_dtypes(job: Job, rank: int) -> Training:
    return _simple(wrap(job, Mixed()), labelled)


class Normed(nn.Module):
    """Batch normalisation: buffers that rank 0 hands to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.readout = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.readout(F.relu(self.norm(self.read_in(x))))
        return logits


def with_buffers(job: Job, rank: int) -> Training:
    return _simple(wrap(job, Normed()), labelled)


def two_modules(job: Job, rank: int) -> Training:
    """Two wrapped modules with an optimizer each, one feeding the other."""
    one, other = wrap(job, nn.Linear(12, 12)), wrap(job, Net())
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(other(torch.tanh(one(x))), labels)
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss.detach()

    return Training(step, [one, other], labelled)


def adversarial(job: Job, rank: int) -> Training:
    """A judge that is trained, then judges for the generator: its gradients are reduced twice."""
    generator, judge = wrap(job, nn.Linear(12, 12)), wrap(job, Net())
    first = torch.optim.SGD(judge.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(x)
        loss = F.cross_entropy(judge(x), labels) - 0.1 * F.cross_entropy(judge(fake), labels)
        loss.backward()
        first.step()
        first.zero_grad()
        F.cross_entropy(judge(generator(x)), labels).backward()
        second.step()
        second.zero_grad()
        first.step()  # on what the second backward has left
        first.zero_grad()
        return loss.detach()

    return Training(step, [generator, judge], labelled)


def visible(job: Job, rank: int) -> Training:
    """A step that clears gradients first, so that they stay for the user to see."""
    model = wrap(job, Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        norm: Tensor = model.module.readout.weight.grad.norm()
        return norm

    return Training(step, [model], labelled)


def twice(job: Job, rank: int) -> Training:
    """One module, two forwards, one backward."""
    model = wrap(job, Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x[:4]), labels[:4]) + F.cross_entropy(model(x[4:]), labels[4:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], labelled)


def subgroup(job: Job, rank: int) -> Training:
    """Every rank in a group of its own: nothing is averaged across ranks."""
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    return _simple(wrap(job, Net(), process_group=groups[rank]), labelled)


def sparse(job: Job, rank: int) -> Training:
    """An embedding with sparse gradients."""
    model = wrap(job, nn.Sequential(nn.EmbeddingBag(10, 12, mode="sum", sparse=True), Net()))

    def batch(number: int, rank: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(100 * number + rank)
        tokens = torch.randint(10, (8, 3), generator=generator)
        return tokens, torch.randint(6, (8,), generator=generator)

    return _simple(model, batch)


def hooked(job: Job, rank: int) -> Training:
    """The user's own communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    training = plain(job, rank)
    training.modules[0].register_comm_hook(None, allreduce_hook)
    return training


def joined(job: Job, rank: int) -> Training:
    """Run inside ``join()``."""
    training = plain(job, rank)
    training.around = training.modules[0].join
    return training
