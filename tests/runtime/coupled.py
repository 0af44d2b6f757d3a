"""Optimizers whose parameters depend on each other, as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class GlobalNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients together."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.addcdiv_(p.grad, total.expand_as(p), value=-group["lr"])


class ClippedLamb(torch.optim.Optimizer):
    """LAMB that clips the gradients of all parameters first (You et al. 2020, as NVIDIA's)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, max_norm: float = 1.0) -> None:
        defaults = {"lr": lr, "max_norm": max_norm, "betas": (0.9, 0.999), "eps": 1e-6, "wd": 0.01}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        one, total = torch.tensor(1.0), torch.zeros(1)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total.add_(p.grad.pow(2).sum())
        total = torch.sqrt(total).squeeze()
        bound = self.defaults["max_norm"]
        clip = torch.where(total > bound, total / bound, one)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad / clip, group, one)

    def _update(self, p: Any, grad: torch.Tensor, group: dict[str, Any], one: torch.Tensor) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        m, v = state["m"], state["v"]
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        c1, c2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        update = (m / c1) / ((v / c2).sqrt() + group["eps"]) + group["wd"] * p
        w_norm, u_norm = p.norm(), update.norm()
        ratio = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, one)
        p.add_(update * ratio, alpha=-group["lr"])


class ClippingAdam(torch.optim.Adam):
    """Adam that calls torch's own clipping, which changes ``.grad``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class BranchesOnNorm(GlobalNorm):
    """Scales in Python where the norm is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = sum(p.grad.norm().item() ** 2 for p in group["params"]) ** 0.5
            scale = 1.0
            if total > 3.0:
                scale = 3.0 / total
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * scale)


class LargestNorm(GlobalNorm):
    """Divides by the largest norm of a gradient, which ``max`` finds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"]]
        total = max(p.grad.norm().item() for p in params)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / total, alpha=-group["lr"])


class NormOfUpdates(GlobalNorm):
    """Scales by the norm of what the gradients are after they were divided by their own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"]]
        total = torch.stack([p.grad.norm() for p in params]).square().sum().sqrt()
        updates = [p.grad / (1 + total) + 0.1 * p for p in params]
        again = torch.cat([u.norm().reshape(1) for u in updates]).norm()
        for p, update in zip(params, updates, strict=True):
            p.sub_(update / again * self.param_groups[0]["lr"])


class MeanNorm(GlobalNorm):
    """Divides by the mean of the norms: it matters how many there are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            mean = sum(p.grad.norm() for p in group["params"]) / len(group["params"])
            for p in group["params"]:
                p.sub_(p.grad / mean, alpha=group["lr"])


class OneAfterAnother(GlobalNorm):
    """Divides by the norm of the gradients so far."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        so_far: Any = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                so_far = so_far + p.grad.norm()
                p.sub_(p.grad / so_far, alpha=group["lr"])


class Neighbours(GlobalNorm):
    """Moves each parameter by the norm of the gradient of the one before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, before in zip(group["params"][1:], group["params"], strict=False):
                p.sub_(before.grad.norm(), alpha=group["lr"])


class FirstGroupsRate(GlobalNorm):
    """Divides by a global norm, with the learning rate of the first group for all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"]]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / total, alpha=self.param_groups[0]["lr"])


class NormOfWeights(GlobalNorm):
    """Divides by the norm of all parameters, those without a gradient included."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"]]
        total = torch.stack([p.norm() for p in params]).norm()
        for p in params:
            if p.grad is not None:
                p.sub_(p.grad / total, alpha=self.param_groups[0]["lr"])


class SkipsAll(GlobalNorm):
    """Leaves all parameters as they are if one gradient is large; Python decides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            skip = False
            for p in group["params"]:
                if p.grad.norm().item() > 100.0:
                    skip = True
            for p in group["params"]:
                if not skip:
                    p.sub_(p.grad, alpha=group["lr"])


class CapsEach(GlobalNorm):
    """Divides by a sum of norms, each of which Python limits first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = 0.0
            for p in group["params"]:
                norm = p.grad.norm().item()
                if norm > 3.0:
                    norm = 3.0
                total = total + norm
            for p in group["params"]:
                p.sub_(p.grad / total, alpha=group["lr"])


class RememberedNorm(torch.optim.Optimizer):
    """Divides by a moving average of the global norm, which it keeps in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "average": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = torch.stack([p.grad.norm() for p in group["params"]]).norm().item()
            group["average"] = 0.9 * group["average"] + 0.1 * total
            for p in group["params"]:
                p.sub_(p.grad / group["average"], alpha=group["lr"])
