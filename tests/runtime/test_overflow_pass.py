"""What is not finite is found element by element, in the pass that takes the norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompile.runtime.grads import ClipNorm, ClipValue, GradPlan
from mpcompile.runtime.guarding import guarded_plan
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.overflows import NotFinite
from mpcompile.runtime.scale_policy import ScalePolicy
from mpcompile.runtime.update import OptimizerUpdate
from tests.codegen.cuda_on_host import HostMachine
from tests.runtime.updating import parameters, relative_difference, set_grads

SHAPES = ((3, 4), (7,), (130, 150), (1,))
CLIPS: dict[str, tuple[ClipNorm | ClipValue, ...]] = {
    "none": (),
    "norm": (ClipNorm(1.0),),
    "norm of order 1": (ClipNorm(1.0, 1.0),),
    "norm of order inf": (ClipNorm(1.0, math.inf),),
    "norm of order 9": (ClipNorm(1.0, 9.0),),
    "value": (ClipValue(0.5),),
    "value, then norm": (ClipValue(0.5), ClipNorm(1.0)),
    "norm, then norm": (ClipNorm(2.0), ClipNorm(1.0)),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PASSES = [
    ("none", torch.float16),
    ("norm", torch.float16),
    ("value, then norm", torch.float16),
    ("norm of order inf", torch.bfloat16),
    ("norm of order 9", torch.float32),
    ("norm, then norm", torch.float32),
    ("norm", torch.float64),
    ("norm of order 1", torch.float64),
]
"""What tells what is not finite is the norm in the second, fourth and sixth, another sum else."""


@pytest.fixture(params=["host", "device"])
def machine(request: pytest.FixtureRequest) -> HostMachine | None:
    """Return the machine that runs CUDA text, or None where updates are C++."""
    return request.getfixturevalue("host_machine") if request.param == "device" else None


class Asked:
    """A verdict that takes every step and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[NotFinite] = []

    def __call__(self, found: NotFinite | None) -> Tensor:
        assert found is not None, "the update has looked"
        self.told.append(found)
        return torch.zeros(1)

    def owners(self) -> set[int]:
        """Return which gradients were not finite, by position."""
        (found,) = self.told
        pieces = found.flags.nonzero().flatten()
        owned = pieces if found.owners is None else found.owners[pieces]
        if len(pieces):
            assert int(found.first()) == int(owned[0])
        return set(owned.tolist())


def ready(dtype: torch.dtype = torch.float32) -> tuple[list[torch.nn.Parameter], OptimizerUpdate]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    params = parameters(SHAPES, wide)
    return params, OptimizerUpdate(torch.optim.SGD(params, lr=0.0))


def gradients(params: Sequence[Tensor], dtype: torch.dtype, value: float) -> list[Tensor]:
    return [torch.full_like(param, value, dtype=dtype) for param in params]


@pytest.mark.parametrize(("clips", "dtype"), PASSES)
def test_flags_are_those_of_the_elements(
    clips: str, dtype: torch.dtype, machine: HostMachine | None
) -> None:
    largest = torch.finfo(dtype).max
    params, update = ready(dtype)
    for bad, where in ((math.inf, 2), (-math.inf, 0), (math.nan, 3), (0.0, None)):
        grads = gradients(params, dtype, -largest)  # whose sums and squares have no room in f32
        grads[2].view(-1)[::2] = largest
        if where is not None:
            grads[where].view(-1)[-1] = bad
        asked = Asked()
        outcome = update.run(grads, GradPlan(clips=CLIPS[clips], verdict=asked))
        assert outcome.fused, outcome.reason
        assert asked.owners() == (set() if where is None else {where})


def test_gradients_of_several_dtypes_are_told_apart(machine: HostMachine | None) -> None:
    for clips in (CLIPS["norm"], CLIPS["none"]):
        params, update = ready(torch.float64)
        grads = [torch.ones_like(p, dtype=dtype) for p, dtype in zip(params, DTYPES, strict=True)]
        grads[3].fill_(1e300)
        grads[1][4] = math.nan
        asked = Asked()
        assert update.run(grads, GradPlan(clips=clips, verdict=asked)).fused
        assert asked.owners() == {1}


def test_unscaling_that_overflows_counts(machine: HostMachine | None) -> None:
    """The update would write Inf: torch's own check, on scaled gradients, does not see it."""
    for clips in (CLIPS["norm"], CLIPS["value"]):
        params, update = ready()
        grads = gradients(params, torch.float32, 1.0)
        grads[1][3] = 1e36
        asked = Asked()
        update.run(grads, GradPlan(factor=2.0**14, clips=clips, verdict=asked))
        assert asked.owners() == {1}


# --- one read of each gradient -------------------------------------------------------------------


class _Reads(TorchDispatchMode):
    """Counts operations of torch that read one of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._known = {tensor.data_ptr() for tensor in tensors}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if any(tensor.data_ptr() in self._known for tensor in tensors):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reads_of(tensors: Sequence[Tensor]) -> Iterator[list[str]]:
    with _Reads(tensors) as reads:
        yield reads.found


def scaled_update(clips: str) -> tuple[OptimizerUpdate, LossScale, Any]:
    """Return an update, its loss scale, and what takes a step with given gradients."""
    params = parameters(SHAPES)
    opt = torch.optim.AdamW(params, lr=0.01)
    set_grads(0, params)
    opt.step()
    update, scale = OptimizerUpdate(opt), LossScale(ScalePolicy(initial=1024.0))
    scale.tells_of_trouble = False

    def step(grads: list[Tensor]) -> bool:
        scale.begin_call()
        plan = guarded_plan(GradPlan(clips=CLIPS[clips]), scale, opt, grads, is_scaled=True)
        outcome = update.run(grads, plan)
        scale.end_call(failed=False)
        assert outcome.fused, outcome.reason
        return outcome.skipped

    return update, scale, step


@pytest.mark.parametrize(
    ("clips", "names"),
    [
        ("norm", ["gradient norm and overflow"]),
        ("value, then norm", ["gradient norm and overflow"]),
        ("norm, then norm", ["gradient norm and overflow", "gradient norm"]),
        ("none", ["gradient overflow"]),
        ("value", ["gradient overflow"]),
    ],
)
def test_norm_and_overflow_are_one_pass(
    clips: str, names: list[str], machine: HostMachine | None
) -> None:
    update, _, step = scaled_update(clips)
    grads = gradients(update.optimizer.param_groups[0]["params"], torch.float16, 100.0)
    step(grads)
    before = 0 if machine is None else machine.num_launches
    with reads_of(grads) as reads:
        step(grads)
    assert reads == []
    *passes, kernel = update.record().kernels
    assert [record.name for record in passes] == names
    assert passes[0].bytes_read == sum(2 * grad.numel() for grad in grads)
    assert kernel.name.startswith("AdamW")
    if machine is not None:
        assert machine.num_launches - before == len(names) + 1


def test_norm_of_16_bits_needs_no_second_sum(machine: HostMachine | None) -> None:
    update, _, step = scaled_update("norm")
    step(gradients(update.optimizer.param_groups[0]["params"], torch.float16, 100.0))
    (found, _) = update.record().kernels
    assert "SUMS = 1;" in found.source


@pytest.mark.parametrize("clips", ["none", "norm"])
def test_skipped_step_leaves_everything_and_has_a_name(
    clips: str, machine: HostMachine | None
) -> None:
    update, scale, step = scaled_update(clips)
    params = update.optimizer.param_groups[0]["params"]
    for bad in (False, True, False, True):
        grads = gradients(params, torch.float16, 100.0)
        grads[2][129, 0] = math.inf if bad else 1.0
        before = [p.detach().clone() for p in params]
        step(grads)
        same = [torch.equal(a, b) for a, b in zip(before, params, strict=True)]
        assert same == [bad] * len(SHAPES)
    assert {float(s["step"]) for s in update.optimizer.state_dict()["state"].values()} == {3.0}
    record = scale.record()
    assert record is not None
    assert (record.scale, record.first) == (256.0, "parameter 2 of AdamW")


def test_skipped_step_keeps_no_gradients(machine: HostMachine | None) -> None:
    update, _, step = scaled_update("norm")
    params = update.optimizer.param_groups[0]["params"]
    step(gradients(params, torch.float16, 1.0))
    step(gradients(params, torch.float16, math.inf))
    (prepared,) = update.prepared.values()
    assert prepared.current_grads == ()


def test_first_step_that_overflows_is_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch, machine: HostMachine | None
) -> None:
    """With numbers in the place of what is not finite: a kernel must not go untried."""
    from mpcompile.runtime import trial

    compared: list[float] = []
    compare = trial._compare

    def noting(before: Any, eager: Any, fused: Any, tolerance: float) -> None:
        compare(before, eager, fused, tolerance)
        compared.append(relative_difference(before.params, fused.params))

    monkeypatch.setattr(trial, "_compare", noting)
    update, _, step = scaled_update("norm")
    params = update.optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    step(gradients(params, torch.float16, math.nan))
    assert all(map(torch.equal, before, params))
    assert [math.isfinite(change) and change > 0 for change in compared] == [True]
