"""Optimizers written by hand, as users write them: Python-int steps, norms, sign updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, wd: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["wd"])
                exp_avg = state["exp_avg"]
                update = exp_avg.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio of norms for each tensor (You et al. 2020); an int counts steps."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, wd: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                c1, c2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                update = (m / c1) / ((v / c2).sqrt() + group["eps"])
                if group["wd"] != 0:
                    update = update + group["wd"] * p
                w_norm, u_norm = p.norm(), update.norm()
                ratio = torch.where(
                    w_norm > 0,
                    torch.where(u_norm > 0, w_norm / u_norm, torch.ones_like(w_norm)),
                    torch.ones_like(w_norm),
                )
                p.add_(update * ratio, alpha=-group["lr"])


class Lars(torch.optim.Optimizer):
    """Momentum with a local rate from norms (You et al. 2017); branches on data in Python."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "wd": 1e-4, "trust": 0.001})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                    state["seen"] = 0
                state["seen"] += 1
                p_norm, g_norm = torch.norm(p).item(), torch.norm(p.grad).item()
                local = 1.0
                if p_norm > 0 and g_norm > 0:
                    local = group["trust"] * p_norm / (g_norm + group["wd"] * p_norm)
                update = p.grad.add(p, alpha=group["wd"]).mul_(local)
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                p.add_(state["momentum_buffer"], alpha=-group["lr"])


class AdamWithEma(torch.optim.Adam):
    """Adam that keeps a moving average of the weights, with a rate from ``math.sqrt``."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "ema" not in state:
                    state["ema"] = p.detach().clone()
                    state["updates"] = 0
                state["updates"] += 1
                decay = min(0.999, 1 - 1 / math.sqrt(1 + state["updates"]))
                state["ema"].lerp_(p.detach(), 1 - decay)


class RelativeStep(torch.optim.Optimizer):
    """A rate from the step count and the size of the parameter, as Adafactor of transformers."""

    def __init__(self, params: Iterable[Any], warmup: bool = False) -> None:
        super().__init__(params, {"eps": 1e-3, "decay": -0.8, "warmup": warmup})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, rms=0, square=torch.zeros_like(p))
                state["step"] += 1
                state["rms"] = p.norm(2) / (p.numel() ** 0.5)
                smallest = 1e-6 * state["step"] if group["warmup"] else 1e-2
                rate = min(smallest, 1.0 / math.sqrt(state["step"]))
                rate = max(group["eps"], state["rms"]) * rate
                beta = 1.0 - math.pow(state["step"], group["decay"])
                state["square"].mul_(beta).add_(p.grad**2 + 1e-30, alpha=1.0 - beta)
                p.sub_(state["square"].rsqrt() * p.grad * rate)


class BakedIn(torch.optim.Optimizer):
    """Computes with its step count where no tracer can follow."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / float(str(int(state["step"]))))


class CountsInGroup(torch.optim.Optimizer):
    """Keeps its step count in the group, as some schedule-free optimizers do."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


class WarmsUp(torch.optim.Optimizer):
    """Keeps count and rate in its groups; every number that a step leaves there is the next's."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "range": (0, 0.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            rate = group["lr"] * min(1.0, group["steps"] / 5)
            group["range"] = (group["range"][0] + 2, rate)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rate)


class BranchesOnTensors(torch.optim.Optimizer):
    """Branches on 0-dim tensors, not on numbers; both branches are met."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "bound": 2.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                norm = update.norm()
                if norm > group["bound"]:
                    update = update * (group["bound"] / norm)
                p.add_(update, alpha=-group["lr"])


class CentersRows(torch.optim.Optimizer):
    """Counts in its group, and takes the mean of rows, which stays an ATen call."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                grad = p.grad
                if p.dim() > 1:
                    grad = grad - grad.mean(dim=-1, keepdim=True)
                p.add_(grad, alpha=-group["lr"] / group["count"])


class CountsParameters(torch.optim.Optimizer):
    """Counts the parameters that it has updated, in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                group["count"] += 1
                p.add_(p.grad, alpha=-group["lr"])


class NamesItsPhase(torch.optim.SGD):
    """Keeps the name of a phase in its groups, and leaves another one there."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["phase"] = "early"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        phase = self.param_groups[0]["phase"]
        self.param_groups[0]["phase"] = "late" if phase == "early" else "early"


class ChangesTensorOfGroup(torch.optim.Optimizer):
    """Keeps its rate as a tensor of the group, and halves it in place."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"rate": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["rate"])
            group["rate"].mul_(0.5)


class CountsInState(torch.optim.Optimizer):
    """Keeps its step count in the state under a name, as MADGRAD does."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (1.0 + state["k"].item()))
        state["k"].add_(1)


class CountsInDict(torch.optim.Optimizer):
    """Keeps its step count in a dict of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.counts["steps"])


class CountsItself(torch.optim.Optimizer):
    """Keeps its step count as an attribute."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.num_steps)
