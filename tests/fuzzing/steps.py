"""Random training programs: a model, optimizers, and a step put together from what people write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from tests.fuzzing.models import CLASSES, random_model
from tests.programs import Program
from tests.runtime.optimizers import AdamWithEma, CountsInGroup, Lamb, Lion, WarmsUp

Params = Iterable[Any]
_OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lamb": lambda p: Lamb(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.001),
    "adam with average": lambda p: AdamWithEma(p, lr=0.01),
    "counts in group": lambda p: CountsInGroup(p, lr=0.1),
    "warms up": lambda p: WarmsUp(p, lr=0.1),
}
_ZERO = ("first", "last", "both", "never", "to zero first", "to zero last", "model", "outside")
_CLIP = ("no", "no", "norm", "value", "both", "inf", "by hand", "some", "norm as number")
_BACKWARD = (
    "once", "once", "chunks", "retain", "grad", "inputs", "two losses", "penalty", "closure",
)  # fmt: skip
_AFTER = ("nothing", "nothing", "nothing", "average", "clamp", "evaluate", "scheduler")
_EDIT = ("no", "no", "no", "scale", "noise", "replace", "data", "read")
_RETURN = ("loss", "undetached", "dict", "item", "gradients")
_BETWEEN = (
    "nothing", "nothing", "rate", "freeze", "load", "evaluate", "hook", "data", "clear", "eager",
    "train mode", "add group", "optimizer hook", "reverse", "set gradients", "node hook",
)  # fmt: skip
_READS = ("no", "no", "before", "after", "both")
_NUMBERS = ("lr", "k", "range", "steps")
_LOSS = ("cross entropy", "mse", "smooth", "bce", "smoothed cross entropy")


@dataclass
class Choices:
    """What a seed stands for."""

    optimizer: str
    second: str
    zero: str
    clip: str
    backward: str
    edit: str
    after: str
    result: str
    between: str
    reads: str
    loss: str
    lengths: bool
    skips: bool
    counts: bool

    @staticmethod
    def draw(rng: Random) -> Choices:
        """Draw from ``rng``."""
        names = sorted(_OPTIMIZERS)
        return Choices(
            optimizer=rng.choice(names),
            second=rng.choice(names) if rng.random() < 0.25 else "",
            zero=rng.choice(_ZERO),
            clip=rng.choice(_CLIP),
            backward=rng.choice(_BACKWARD),
            edit=rng.choice(_EDIT),
            after=rng.choice(_AFTER),
            result=rng.choice(_RETURN),
            between=rng.choice(_BETWEEN),
            reads=rng.choice(_READS),
            loss=rng.choice(_LOSS),
            lengths=rng.random() < 0.2,
            skips=rng.random() < 0.15,
            counts=rng.random() < 0.1,
        )


@dataclass
class Parts:
    """What a step works on."""

    choices: Choices
    model: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def numbers(self, at: str) -> Any:
        """Return what the step reads of its optimizers before or after the update."""
        if self.choices.reads not in (at, "both"):
            return None
        groups = [opt.param_groups[0] for opt in self.optimizers]
        return [group[name] for group in groups for name in _NUMBERS if name in group]

    def takes_closure(self) -> bool:
        """Whether the first optimizer calls a closure."""
        return type(self.optimizers[0]).__module__.startswith("torch")

    def params(self) -> list[nn.Parameter]:
        """Return the parameters that train, each once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        out, kind = self.model(x), self.choices.loss
        goal = F.one_hot(labels, CLASSES).float()
        if kind == "mse":
            return F.mse_loss(out, goal)
        if kind == "smooth":
            return F.smooth_l1_loss(out, goal)
        if kind == "bce":
            return F.binary_cross_entropy_with_logits(out, goal)
        return F.cross_entropy(out, labels, label_smoothing=0.1 if "smoothed" in kind else 0.0)


def _clear(parts: Parts, at: str) -> None:
    zero = parts.choices.zero
    if zero in (at, "both"):
        for opt in parts.optimizers:
            opt.zero_grad()
    elif zero == f"to zero {at}":
        for opt in parts.optimizers:
            opt.zero_grad(set_to_none=False)
    elif zero == "model" and at == "first":
        parts.model.zero_grad()


def _backward(parts: Parts, x: Tensor, labels: Tensor) -> Tensor:
    kind = parts.choices.backward
    if kind == "chunks":
        total = torch.zeros(())
        for rows, some in zip(x.chunk(2), labels.chunk(2), strict=True):
            loss = parts.loss(rows, some) / 2
            loss.backward()
            total = total + loss.detach()
        return total
    loss = parts.loss(x, labels)
    if kind == "retain":
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
    elif kind == "grad":
        params = parts.params()
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    elif kind == "inputs":
        loss.backward(inputs=parts.params()[1:])
    elif kind == "two losses":
        other = parts.loss(x, labels.flip(0))
        loss.backward()
        (other * 0.1).backward()
    elif kind == "penalty":
        first = [opt.param_groups[0]["params"] for opt in parts.optimizers]
        squares = [p.square().sum() for params in first for p in params]
        loss = loss + 1e-3 * torch.stack(squares).sum()
        loss.backward()
    else:
        loss.backward()
    return loss


def _edit(parts: Parts) -> Any:
    kind = parts.choices.edit
    for index, param in enumerate(parts.params() if kind != "no" else ()):
        if param.grad is None:
            continue
        if kind == "scale":
            param.grad.mul_(0.5)
        elif kind == "noise":
            param.grad.add_(torch.randn_like(param), alpha=0.01)
        elif kind == "replace" and index % 2:
            param.grad = param.grad * 0.3 + 0.01
        elif kind == "data":
            param.grad.data.clamp_(-0.1, 0.1)
    if kind == "read":
        return sum(float(p.grad.norm()) for p in parts.params() if p.grad is not None)
    return None


def _clip(parts: Parts) -> Any:
    kind, params = parts.choices.clip, parts.params()
    if kind == "norm":
        return torch.nn.utils.clip_grad_norm_(params, 0.3)
    if kind == "norm as number":
        return torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 0.3).item()
    if kind == "inf":
        return torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf"))
    if kind == "some":
        return torch.nn.utils.clip_grad_norm_(params[1:], 0.1)
    if kind == "value":
        torch.nn.utils.clip_grad_value_(params, 0.05)
    if kind == "both":
        torch.nn.utils.clip_grad_value_(params, 0.05)
        torch.nn.utils.clip_grad_norm_(params, 0.2)
    if kind == "by hand":
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.mul_((0.3 / (norm + 1e-6)).clamp(max=1.0))
        return norm
    return None


def _after(parts: Parts, x: Tensor, labels: Tensor) -> Any:
    kind = parts.choices.after
    with torch.no_grad():
        if kind == "average":
            for old, new in zip(parts.average, parts.model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        if kind == "clamp":
            for param in parts.model.parameters():
                param.clamp_(-1.0, 1.0)
        if kind == "evaluate":
            return parts.loss(x, labels)
    if kind == "scheduler":
        for scheduler in parts.schedulers:
            scheduler.step()
    return None


def build_step(parts: Parts) -> Callable[..., Any]:
    """Return the step."""
    choices = parts.choices

    def step(x: Tensor, labels: Tensor, update: bool) -> Any:
        if choices.counts:
            parts.log.append(len(parts.log))
        seen = [parts.numbers("before")]

        def closure() -> Tensor:
            _clear(parts, "first")
            loss = _backward(parts, x, labels)
            seen.append(_edit(parts))
            return loss

        if not update:
            return _result(parts, closure(), seen)
        loss = _update(parts, closure, seen)
        seen += [parts.numbers("after"), _after(parts, x, labels)]
        _clear(parts, "last")
        return _result(parts, loss, seen)

    return step


def _update(parts: Parts, closure: Callable[[], Tensor], seen: list[Any]) -> Tensor:
    """Go back and update; a closure is called by the first optimizer."""
    if parts.choices.backward == "closure" and parts.takes_closure():
        loss: Any = parts.optimizers[0].step(closure)  # type: ignore[arg-type]  # any number does
        others = parts.optimizers[1:]
    else:
        loss, others = closure(), parts.optimizers
        seen.append(_clip(parts))
    for opt in others:
        opt.step()
    return loss  # type: ignore[no-any-return]


def _result(parts: Parts, loss: Tensor, seen: list[Any]) -> Any:
    kind = parts.choices.result
    if kind == "undetached":
        return loss, seen
    if kind == "item":
        return loss.item(), seen
    if kind == "dict":
        return {"loss": loss.detach(), "seen": seen}
    if kind == "gradients":
        return [p.grad for p in parts.params()], loss.detach(), seen
    return loss.detach(), seen


def _freeze(parts: Parts, call: int) -> None:
    next(parts.model.parameters()).requires_grad_(call % 2 == 0)


def _load(parts: Parts, call: int) -> None:
    opt = parts.optimizers[0]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def _replace_data(parts: Parts, call: int) -> None:
    param = next(parts.model.parameters())
    param.data = param.data * 0.9


def _add_group(parts: Parts, call: int) -> None:
    parts.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def _hook_parameter(parts: Parts, call: int) -> None:
    hook: Any = lambda grad: grad * 2  # noqa: E731  # register_hook is not typed
    list(parts.model.parameters())[-1].register_hook(hook)


def _hook_node(parts: Parts, call: int) -> None:
    param = list(parts.model.parameters())[-1]
    path: Any = param.view_as(param).grad_fn
    node = path.next_functions[0][0] if path is not None else None
    if node is not None:
        parts.kept += [node, node.register_prehook(lambda grads: (grads[0] * 2,))]


def _hook_optimizer(parts: Parts, call: int) -> None:
    parts.optimizers[0].register_step_pre_hook(lambda *args: parts.log.append("before"))


def _set_gradients(parts: Parts, call: int) -> None:
    for index, param in enumerate(parts.model.parameters()):
        param.grad = torch.full_like(param, 0.01) if (index + call) % 3 else None


def _clear_outside(parts: Parts, call: int) -> None:
    for opt in parts.optimizers:
        opt.zero_grad(set_to_none=call % 3 != 0)


def _set_decay(parts: Parts, call: int) -> None:
    parts.optimizers[0].param_groups[0]["weight_decay"] = 0.01 * call


Change = Callable[[Parts, int], Any]
_EACH_CALL: dict[str, Change] = {
    "rate": _set_decay,
    "freeze": _freeze,
    "load": _load,
    "data": _replace_data,
    "train mode": lambda parts, call: parts.model.train(call % 2 == 0),
    "set gradients": _set_gradients,
}
_ONCE: dict[str, Change] = {
    "hook": _hook_parameter,
    "node hook": _hook_node,
    "clear": lambda parts, call: parts.optimizers[0].state.clear(),
    "add group": _add_group,
    "optimizer hook": _hook_optimizer,
    "reverse": lambda parts, call: parts.optimizers[0].param_groups[0]["params"].reverse(),
}


def _change(parts: Parts, call: int, batch: Callable[[int], Any], step: Callable[..., Any]) -> None:
    """Do between two calls what the choices say."""
    kind = parts.choices.between
    if kind in _EACH_CALL and call:
        _EACH_CALL[kind](parts, call)
    if kind in _ONCE and call == 2:
        _ONCE[kind](parts, call)
    if kind == "evaluate":
        with torch.no_grad():
            parts.log.append(parts.loss(*batch(call)[:2]))
    if kind == "eager" and call == 2:
        step(*batch(call + 50))
    if parts.choices.zero == "outside":
        _clear_outside(parts, call)


def random_program(seed: int) -> Program:
    """Return the program of ``seed``, the same every time."""
    rng = Random(seed)
    choices = Choices.draw(rng)
    model, inputs = random_model(rng)
    params = list(model.parameters())
    if rng.random() < 0.15 and len(params) > 3:
        params[rng.randrange(2)].requires_grad_(False)
    cut = rng.randint(1, len(params) - 1) if choices.second else len(params)
    optimizers = [_OPTIMIZERS[choices.optimizer](_groups(rng, params[:cut]))]
    if choices.second:
        optimizers.append(_OPTIMIZERS[choices.second](params[cut:]))
    parts = Parts(choices, model, optimizers)
    if choices.after == "average":
        parts.average = [p.detach().clone() for p in params]
    if choices.after == "scheduler":
        parts.schedulers = [lr_scheduler.ExponentialLR(opt, 0.9) for opt in optimizers]
    step = build_step(parts)

    def batch(call: int) -> tuple[Any, ...]:
        rows = 4 + 2 * (call % 3) if choices.lengths else 4
        labels = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(call))
        return inputs(call, rows), labels, not choices.skips or call % 2 == 1

    def before(call: int) -> None:
        _change(parts, call, batch, step)

    return Program(step, model, optimizers, batch, before, parts.log, parts.average)


def _groups(rng: Random, params: list[nn.Parameter]) -> Any:
    if len(params) < 2 or rng.random() < 0.7:
        return params
    return [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}]
