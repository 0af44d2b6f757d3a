"""Faults planted into the CUDA text are caught by running it on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from mpcompile.runtime import trial
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.updating import relative_difference, set_grads

GUARD = 777.0
SIZES = (19_501, 3, 4103)


def _guarded(offset: int) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return parameters inside larger tensors; what is around them must not change."""
    generator = torch.Generator().manual_seed(0)
    bases = [torch.full((size + 32,), GUARD) for size in SIZES]
    views = [base[8 + offset : 8 + offset + n] for base, n in zip(bases, SIZES, strict=True)]
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator))
    return [torch.nn.Parameter(view) for view in views], bases


def check_update(machine: HostMachine, offset: int) -> None:
    """Compare AdamW with clipping, 16-bit copies and a skipped step with eager."""
    fused_params, bases = _guarded(offset)
    lists = [[torch.nn.Parameter(p.detach().clone()) for p in fused_params], fused_params]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    update.set_copies({p: torch.zeros_like(p, dtype=torch.bfloat16) for p in fused_params})
    for step in range(5):
        set_grads(step, *lists)
        is_skipped = step == 3
        if not is_skipped:
            torch.nn.utils.clip_grad_norm_(lists[0], 0.5)
            pair[0].step()
        skip = torch.full((), float(is_skipped))
        outcome = update.run(plan=GradPlan(clips=(ClipNorm(0.5),), skip=skip))
        assert outcome.fused == (step > 0), update.reason
    assert relative_difference(*lists) <= 1e-6
    for base, size in zip(bases, SIZES, strict=True):
        assert bool((base[: 8 + offset] == GUARD).all()), "written before the tensor"
        assert bool((base[8 + offset + size :] == GUARD).all()), "written behind the tensor"
    for param, copy in update.copies.items():
        assert torch.equal(copy, param.detach().bfloat16()), "a copy is not rounded to nearest"
    for param in fused_params:
        assert pair[1].state[param]["step"] == 4


@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_text_as_emitted_is_right(
    offset: int, host_machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "check", lambda *args: None)
    check_update(host_machine, offset)
    assert any(module.num_wide for module in host_machine.modules.values())


FAULTS: dict[str, tuple[str, str]] = {
    "tail one too short": ("i < rest;", "i < rest - 1;"),
    "tail one too long": ("i < rest;", "i <= rest;"),
    "body one access too short": (
        "(head, count, element);",
        "(head, count - 4 > head ? count - 4 : count, element);",
    ),
    "alignment not checked": ("if (!(is_aligned", "if (false && !(is_aligned"),
    "no skip": ("if (t.skip != nullptr && *t.skip != 0.0f) return;", ""),
    "truncated instead of rounded": ("(u + 0x7fffu + ((u >> 16) & 1u)) >> 16", "u >> 16"),
    "first block finishes": ("== unsigned(blocks - 1)", "== 0u"),
    "counter not reset": ("if (s.is_last) *arrivals = 0;", ""),
    "uniform values without a barrier": (
        "}\n  __syncthreads();\n  const float v0",
        "}\n  const float v0",
    ),
    "partial sums of half the threads": ("half = THREADS / 2;", "half = THREADS / 4;"),
    "norm of a part": ("<Sum>(t, 0, gridDim.x,", "<Sum>(t, 0, 5,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, host_machine: HostMachine
) -> None:
    monkeypatch.setattr(trial, "check", lambda *args: None)
    right, wrong = FAULTS[fault]
    changed: list[str] = []

    def plant(source: str) -> str:
        changed.append(source.replace(right, wrong))
        return changed[-1]

    host_machine.rewrite = plant
    caught = [_fails(partial(check_update, host_machine, offset)) for offset in (0, 1)]
    assert all(changed)
    assert set(changed) - set(host_machine.modules), "the fault was not planted"
    assert any(caught)


def _fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False
