"""The loss scale: how it changes, what it notes, when an update is skipped."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.config import Config
from mpcompile.errors import CaptureError
from mpcompile.runtime.loss_scale import LossScale, find_scale
from mpcompile.runtime.overflows import overflows_of
from mpcompile.runtime.scale_policy import PRESETS, ScalePolicy
from mpcompile.runtime.scale_state import Field
from tests.codegen.cuda_on_host import HostMachine

CPU = torch.device("cpu")
GOOD, BAD = torch.ones(()), torch.tensor(math.inf)


def steps(scale: LossScale, pattern: str) -> list[float]:
    """Run steps, overflowing where ``pattern`` says x; return the scale after each."""
    source = scale.add_region().source
    found = []
    for letter in pattern:
        scale.begin_call()
        scale.note(source, [GOOD, BAD if letter == "x" else GOOD])
        scale.end_call(failed=False)
        found.append(float(scale.state(CPU)[Field.SCALE]))
    return found


def quiet(policy: ScalePolicy) -> LossScale:
    scale = LossScale(policy)
    scale.tells_of_trouble = False
    return scale


def test_scale_halves_at_once_and_doubles_after_the_interval() -> None:
    scale = quiet(ScalePolicy(initial=8.0, growth_interval=3))
    assert steps(scale, "..x.....") == [8, 8, 4, 4, 4, 8, 8, 8]


def test_scale_stays_between_floor_and_ceiling() -> None:
    scale = quiet(ScalePolicy(initial=4.0, growth_interval=1, floor=2.0, ceiling=8.0))
    assert steps(scale, "..xxx") == [8, 8, 4, 2, 2]
    assert scale.state(CPU)[Field.AT_FLOOR] == 1


def test_hysteresis_forgives_once_until_the_scale_has_grown() -> None:
    """As DeepSpeed counts: patience comes back with a doubling, not with a good step."""
    scale = quiet(ScalePolicy(initial=8.0, growth_interval=3, hysteresis=2))
    assert steps(scale, "x.x...x.x") == [8, 8, 4, 4, 4, 8, 8, 8, 4]


def test_static_scale_stays_but_notes_overflows() -> None:
    scale = quiet(ScalePolicy(initial=8.0, is_static=True, growth_interval=1))
    assert steps(scale, "..x") == [8, 8, 8]
    assert bool(scale.skipped())
    assert scale.state(CPU)[Field.OVERFLOWS] == 1


def test_inverse_is_exact() -> None:
    scale = quiet(ScalePolicy())
    steps(scale, "xxx")
    state = scale.state(CPU)
    assert float(state[Field.SCALE] * state[Field.INVERSE]) == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dynamic", (65536.0, 2000, 2.0**-14, 2.0**24, 1)),
        ("torch", (65536.0, 2000, 2.0**-126, 2.0**126, 1)),
        ("apex", (65536.0, 2000, 2.0**-126, 2.0**24, 1)),
        ("fairseq", (128.0, 16384, 2.0**-13, 2.0**126, 1)),
        ("deepspeed", (65536.0, 1000, 1.0, 2.0**126, 2)),
    ],
)
def test_presets_have_their_systems_constants(name: str, expected: tuple[float, ...]) -> None:
    policy = PRESETS[name]
    found = (policy.initial, policy.growth_interval, policy.floor, policy.ceiling)
    assert (*found, policy.hysteresis) == expected


def test_default_is_what_grad_scaler_starts_with() -> None:
    scaler: Any = torch.amp.GradScaler("cpu")
    policy = ScalePolicy()
    assert policy.initial == scaler.get_scale()
    assert policy.growth_interval == scaler.get_growth_interval()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)


def test_scale_follows_grad_scaler_over_many_steps() -> None:
    pattern = "....x..x.......xx.........x"
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for letter in pattern:
        weight.grad = torch.full((2,), math.inf if letter == "x" else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(opt)
        scaler.update()
        expected.append(scaler.get_scale())
    assert steps(quiet(ScalePolicy(initial=64.0, growth_interval=4)), pattern) == expected


def test_options_change_a_preset() -> None:
    options = {"dtype": "fp16", "loss_scale": "deepspeed", "scale_ceiling": 1024, "hysteresis": 3}
    policy = ScalePolicy.from_config(Config.from_options(options, environ={}))
    assert (policy.ceiling, policy.hysteresis, policy.growth_interval) == (1024.0, 3, 1000)
    assert policy.initial == 1024.0  # within the bounds
    static = Config.from_options({"dtype": "fp16", "loss_scale": 128}, environ={})
    assert ScalePolicy.from_config(static) == ScalePolicy(initial=128.0, is_static=True)


def test_interval_of_fairseq_is_shared_by_the_ranks() -> None:
    """2**14 / world size, in fairseq's own words."""
    fairseq = Config.from_options({"dtype": "fp16", "loss_scale": "fairseq"}, environ={})
    assert ScalePolicy.from_config(fairseq, num_ranks=8).growth_interval == 2048
    assert ScalePolicy.from_config(fairseq).growth_interval == 16384
    asked = {"dtype": "fp16", "loss_scale": "fairseq", "growth_interval": 100}
    config = Config.from_options(asked, environ={})
    assert ScalePolicy.from_config(config, num_ranks=8).growth_interval == 100
    torchs = Config.from_options({"dtype": "fp16", "loss_scale": "torch"}, environ={})
    assert ScalePolicy.from_config(torchs, num_ranks=8).growth_interval == 2000


def test_policies_are_told_in_words() -> None:
    assert str(ScalePolicy()) == "2**-14 to 2**24, doubles after 2000 good steps"
    assert str(PRESETS["deepspeed"]).endswith("good steps, halves at overflow 2")
    assert str(ScalePolicy(is_static=True)) == "kept"


# --- what is noted -------------------------------------------------------------------------------


def test_first_overflow_of_a_step_is_named() -> None:
    scale = quiet(ScalePolicy())
    regions = [scale.add_region() for _ in range(2)]
    for index, region in enumerate(regions):
        region.prepare(CPU, [f"{index}.weight", f"{index}.bias"])
    scale.begin_call()
    scale.note(regions[1].source, [GOOD, BAD])
    scale.note(regions[0].source, [BAD, GOOD])
    scale.end_call(failed=False)
    record = scale.record()
    assert record is not None
    assert (record.first, record.overflows) == ("1.bias", 1)


def test_every_kind_of_gradient_is_looked_at_element_by_element() -> None:
    sparse = torch.tensor([1.0, 0.0, math.inf, 0.0]).to_sparse()
    with_nan = torch.tensor([1.0, math.nan], dtype=torch.float64)
    both = torch.tensor([math.inf, -math.inf])
    large = torch.full((4,), 6e4, dtype=torch.float16)  # whose sum float16 has no room for
    huge = torch.full((4,), 3e38)  # and this one's sum float32
    found = overflows_of([torch.ones(2), sparse, with_nan, both, large, huge, torch.empty(0)])
    assert found.tolist() == [False, True, True, True, False, False, False]
    assert not overflows_of([huge]).any()


def test_program_that_scales_by_itself_is_not_scaled_twice() -> None:
    scale = quiet(ScalePolicy(initial=1024.0))
    scale.begin_call()
    assert scale.factors([torch.tensor(1.0)])[0] == 1024
    assert scale.factors([torch.tensor(256.0)])[0] == 4
    assert scale.factors([torch.ones(3)])[0] == 4  # of another graph of the same backward
    assert scale.factors([torch.tensor(2.0**20)])[0] == 1
    assert scale.factors([torch.tensor(math.inf)])[0] == 1024
    assert scale.factors([torch.tensor(0.0), torch.tensor(2.0)], [1.0, 64.0])[0] == 8
    assert scale.factors([torch.tensor(0.25)])[0] == 1024


def test_backward_outside_the_step_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"backward runs outside .*options=\{'loss_scale': 1\}"):
        quiet(ScalePolicy()).factors([torch.ones(())])
    by_hand = quiet(ScalePolicy(initial=1.0, is_static=True))
    assert by_hand.factors([torch.ones(())]) == (torch.ones(()), torch.ones(()))


def test_scale_of_a_step_that_is_gone_is_refused() -> None:
    scale = LossScale(ScalePolicy())
    assert find_scale(scale.handle) is scale
    with pytest.raises(CaptureError, match=r"no step has the loss scale loss-scale-none\. .*again"):
        find_scale("loss-scale-none")


# --- updates -------------------------------------------------------------------------------------


def optimizer(count: int = 2) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(3)) for _ in range(count)], lr=0.1)


def test_update_is_skipped_for_what_it_reads() -> None:
    scale, opt = quiet(ScalePolicy()), optimizer()
    scale.begin_call()
    assert not scale.skip_for(opt, [torch.ones(3), None])
    assert scale.skip_for(opt, [torch.ones(3), torch.tensor([0.0, math.nan, 0.0])])
    scale.end_call(failed=False)
    record = scale.record()
    assert record is not None
    assert record.first == "parameter 1 of SGD"


def test_update_is_skipped_if_a_graph_that_feeds_it_overflowed() -> None:
    scale, fed, other = quiet(ScalePolicy()), optimizer(), optimizer()
    region = scale.add_region()
    region.prepare(CPU, ["weight"])
    region.fed = (1,)
    scale.begin_call()
    region.before([None, fed.param_groups[0]["params"][0]])
    scale.note(region.source, [BAD])
    finite: list[Tensor | None] = [torch.ones(3), torch.ones(3)]
    assert not scale.skip_for(other, finite)
    assert scale.skip_for(fed, finite)
    scale.end_call(failed=False)
    scale.begin_call()
    assert not scale.skip_for(fed, finite)


def test_call_without_update_ends_no_step_once_there_was_one() -> None:
    scale = quiet(ScalePolicy())
    scale.begin_call()
    scale.skip_for(optimizer(), [torch.ones(3), None])
    scale.end_call(failed=False)
    steps(scale, "x.")  # accumulates
    assert scale.state(CPU)[Field.FOUND] == 1
    assert scale.state(CPU)[Field.SCALE] == 65536
    scale.begin_call()
    scale.skip_for(optimizer(), [torch.ones(3), None])
    scale.end_call(failed=False)
    assert scale.state(CPU)[Field.SCALE] == 32768


def test_failed_call_ends_no_step() -> None:
    scale = quiet(ScalePolicy())
    scale.begin_call()
    scale.note(scale.add_region().source, [BAD])
    scale.end_call(failed=True)
    assert scale.state(CPU)[Field.SCALE] == 65536


# --- trouble -------------------------------------------------------------------------------------


def test_falls_in_a_row_are_told_of_again_after_a_good_step() -> None:
    scale = LossScale(ScalePolicy())
    with pytest.warns(UserWarning, match="no optimizer is part"):
        steps(scale, "x")
    steps(scale, ".xxxx")
    with pytest.warns(UserWarning, match=r"5 steps in a row overflowed.*loss scale is 1024"):
        steps(scale, "x")
    steps(scale, "x.xxxx")
    with pytest.warns(UserWarning, match="5 steps in a row"):
        steps(scale, "x")


@pytest.mark.parametrize("lateness", [0, 1, 2])
def test_falls_are_told_of_at_most_two_steps_late(lateness: int, host_machine: HostMachine) -> None:
    """As on a GPU, whose numbers arrive when they have been asked for a few times."""
    host_machine.lateness = lateness
    scale = LossScale(ScalePolicy())
    scale.was_asked = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(scale, "xxxxx")
        steps(scale, "xx")
    assert len(caught) == 1
    assert "steps in a row overflowed" in str(caught[0].message)


def test_overflow_of_another_rank_skips_the_update_and_has_no_name_here() -> None:
    asked: list[list[bool]] = []

    def agree_on(flags: Tensor) -> Tensor:
        asked.append(flags.tolist())
        return torch.ones_like(flags) if len(asked) == 2 else flags

    scale, opt = LossScale(ScalePolicy(), agree_on), optimizer()
    scale.tells_of_trouble = False
    finite: list[Tensor | None] = [torch.ones(3), torch.ones(3)]
    bad: list[Tensor | None] = [torch.ones(3), torch.full((3,), math.inf)]
    found = []
    for grads in (bad, finite, finite):
        scale.begin_call()
        skip = bool(scale.skip_for(opt, grads))
        scale.end_call(failed=False)
        record = scale.record()
        assert record is not None
        found.append((skip, record.scale, record.first))
    assert asked == [[True, True], [False, False], [False, False]]
    assert found == [
        (True, 32768.0, "parameter 1 of SGD"),
        (True, 16384.0, ""),
        (False, 16384.0, ""),
    ]
