"""Run an optimizer fused and eager, side by side, and measure how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpcompile.runtime.grads import GradPlan
from mpcompile.runtime.update import OptimizerUpdate

SHAPES = ((3, 4), (7,), (130, 150), (5, 1, 3), (1,))
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_grads(step: int, *lists: list[torch.nn.Parameter]) -> None:
    """Give the parameters of all ``lists`` the same gradients, which depend on ``step``."""
    generator = torch.Generator().manual_seed(100 + step)
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape, generator=generator).to(params[0].dtype)
        for param in params:
            param.grad = grad.clone()


def with_factors(
    params: list[torch.nn.Parameter], step: int, factors: Sequence[float], factor: float = 1.0
) -> list[torch.Tensor]:
    """Return float16 gradients; give ``params`` what they are, times ``factors`` and ``factor``."""
    set_grads(step, params)
    grads = []
    for param, own in zip(params, factors, strict=True):
        assert param.grad is not None
        grads.append((param.grad / own).half())
        param.grad = grads[-1].float() * own * factor
    return grads


def copy_into(source: torch.optim.Optimizer, dest: torch.optim.Optimizer) -> None:
    """Make parameters and state of ``dest`` those of ``source``, in place."""
    pairs = zip(_params(source), _params(dest), strict=True)
    with torch.no_grad():
        for a, b in pairs:
            b.copy_(a)
            for key, value in source.state.get(a, {}).items():
                if isinstance(value, torch.Tensor):
                    dest.state[b][key].copy_(value)
                else:
                    dest.state[b][key] = value


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def excess(old: torch.Tensor, eager: torch.Tensor, fused: torch.Tensor) -> float:
    """Return |dp - dp_eager| over 8 eps |dp_eager| + 1 ulp(p); at most 1 is wanted."""
    if not old.numel():
        return 0.0
    change = eager.double() - old.double()
    difference = (fused.double() - old.double() - change).abs()
    top = torch.full_like(eager, torch.inf)
    ulp = torch.nextafter(eager.abs(), top).double() - eager.abs().double()
    bound = 8 * torch.finfo(eager.dtype).eps * change.abs() + ulp
    return _or_infinite(float((difference / bound).max()))


def _or_infinite(value: float) -> float:
    """Return ``value``, or infinity for NaN, which every comparison would let pass."""
    return math.inf if math.isnan(value) else value


class RoundedOnce(TorchFunctionMode):
    """Eager with square roots and norms rounded to nearest.

    MKL's roots, which eager uses for dense tensors, are off by an ulp now and then, and norms add
    up in f32; where momentum cancels, that alone exceeds any bound relative to the change.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.sqrt, torch.sqrt):
            return args[0].double().sqrt().to(args[0].dtype)
        full = not (kwargs or {}).get("dim") and (kwargs or {}).get("p", "fro") in ("fro", 2)
        if func in (torch.norm, torch.Tensor.norm) and len(args) == 1 and full:
            return args[0].double().norm().to(args[0].dtype)
        if func is torch.Tensor.sqrt_:
            return args[0].copy_(args[0].double().sqrt())
        if func is torch.Tensor.rsqrt_:
            return args[0].copy_(1 / args[0].double().sqrt().to(args[0].dtype))
        return func(*args, **(kwargs or {}))


def worst_excess(
    make: Make, shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = 8
) -> tuple[float, OptimizerUpdate, list[bool]]:
    """Run ``steps`` steps, each from equal states; return the worst excess and what was fused."""
    eager_params, fused_params = parameters(shapes), parameters(shapes)
    eager, fused = make(eager_params), make(fused_params)
    update = OptimizerUpdate(fused)
    worst, was_fused = 0.0, []
    for step in range(steps):
        old = [p.detach().clone() for p in eager_params]
        set_grads(step, eager_params, fused_params)
        with RoundedOnce():
            eager.step()
        was_fused.append(update.run(plan=GradPlan()).fused)
        for before, a, b in zip(old, eager_params, fused_params, strict=True):
            worst = max(worst, excess(before, a.detach(), b.detach()))
        copy_into(eager, fused)
    return worst, update, was_fused


def relative_difference(a: Any, b: Any) -> float:
    """Return the largest relative L2 difference of two lists of tensors.

    It is infinite where one has NaN and the other has not.
    """
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if not torch.equal(x.isnan(), y.isnan()):
            return math.inf
        if x.numel():
            x, y = (t.detach().double().nan_to_num() for t in (x, y))
            worst = max(worst, float((x - y).norm() / x.norm().clamp(min=1e-30)))
    return worst
