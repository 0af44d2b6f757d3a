"""Each pass switched off alone still trains, and does what the design says it does when off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpcompile.backend import last_report
from mpcompile.config import BUILT_PASSES
from mpcompile.graph.diff import op_counts
from mpcompile.inspection.report import RegionReport
from tests.steps import TinyGPT, batch, classifier_step, compile_step, training_region


def train(**options: object) -> tuple[list[float], Any]:
    _, step = classifier_step()
    compiled = compile_step(step, **options)
    return [compiled(*batch()).item() for _ in range(4)], compiled


def gpt_region(**options: object) -> RegionReport:
    torch.manual_seed(0)
    model = TinyGPT(width=32, heads=2, layers=1)

    def step(tokens: torch.Tensor) -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    compiled = compile_step(step, **options)
    compiled(torch.randint(64, (2, 17)))
    return training_region(compiled)


def num_casts(region: RegionReport) -> int:
    return op_counts(region.graph.after)["aten._to_copy"]


@pytest.mark.parametrize("name", BUILT_PASSES)
def test_step_trains_with_one_pass_off(name: str) -> None:
    losses, compiled = train(disable=[name])
    reference = [classifier_step()[1](*batch()).item()]
    assert losses[0] == pytest.approx(reference[0], rel=2e-2)
    assert losses[-1] < losses[0] - 0.1
    records = [r for region in last_report(compiled).regions for r in region.pass_records]
    assert {r.name for r in records if not r.enabled} == {name}
    assert {r.name for r in records} == set(BUILT_PASSES)


@pytest.mark.parametrize("name", ["assign-precision", "insert-casts"])
def test_without_decisions_or_casts_nothing_is_cast(name: str) -> None:
    losses, compiled = train(disable=[name])
    region = training_region(compiled)
    assert region.graph.before == region.graph.after
    assert region.casts == []
    assert region.ops_after.half_share() == 0
    _, step = classifier_step()
    assert losses == [step(*batch()).item() for _ in range(4)]


def test_without_assign_precision_there_are_no_decisions() -> None:
    _, compiled = train(disable=["assign-precision"])
    assert training_region(compiled).decisions == []


def test_without_insert_casts_decisions_are_still_made() -> None:
    _, compiled = train(disable=["insert-casts"])
    assert {d.precision for d in training_region(compiled).decisions} > {"half"}


def test_without_fold_casts_there_are_more_casts_and_the_same_numbers() -> None:
    folded, compiled = train()
    unfolded, without = train(disable=["fold-casts"])
    assert num_casts(training_region(without)) > num_casts(training_region(compiled))
    assert unfolded == folded


def test_without_cast_composites_attention_is_traced_with_fp32_inputs() -> None:
    region = gpt_region(disable=["cast-composites"])
    assert "to(" not in region.dynamo_graph.diff()
    before = [line for line in region.graph.before.splitlines() if "attention" in line]
    assert before
    assert not any("bf16" in line for line in before)


def test_with_cast_composites_attention_is_traced_with_16_bit_inputs() -> None:
    region = gpt_region()
    (forward, *_) = (line for line in region.graph.before.splitlines() if "attention" in line)
    assert "bf16[2,2,16,16]" in forward


def test_all_passes_off_is_the_fp32_step_bit_for_bit() -> None:
    losses, compiled = train(disable=list(BUILT_PASSES))
    _, step = classifier_step()
    assert losses == [step(*batch()).item() for _ in range(4)]
    assert all(region.graph.diff() == "" for region in last_report(compiled).regions)


def test_toggle_from_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE_DISABLE", "insert-casts,fold-casts")
    _, compiled = train()
    assert training_region(compiled).casts == []


def test_default_step_has_casts_and_follows_fp32() -> None:
    losses, compiled = train()
    _, step = classifier_step()
    exact = [step(*batch()).item() for _ in range(4)]
    assert training_region(compiled).ops_after.half_share() == 1
    assert losses == pytest.approx(exact, rel=2e-2)
    assert losses != exact
