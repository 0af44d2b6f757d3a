"""Stock DDP in a compiled step trains as stock DDP does, whatever feature of it is used."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.jobs import Job, Outcome
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.distributed

# The relative error of a gradient that was rounded on each rank and in the sum, times a few for
# momentum and for what a moved parameter does to the next gradient.
WIRES = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}


def train(ranks: Ranks, build: jobs.Build, options: Any = None, **more: Any) -> list[Outcome]:
    return ranks.run(jobs.train, Job(build, options, **more))


def assert_trains_as(found: Outcome, stock: Outcome, start: Outcome, tolerance: float) -> None:
    """Compare what training did to each parameter; a lost or doubled division is far off."""
    assert found.params.keys() == stock.params.keys()
    moved = {name: _distance(value, start.params[name]) for name, value in stock.params.items()}
    noise = 1e-3 * max(moved.values())  # a bias in front of a norm has a gradient of rounding only
    for name, expected in stock.params.items():
        error = _distance(found.params[name], expected)
        assert error <= tolerance * (moved[name] + noise), (name, error, moved[name])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).double().norm())


def check_as_stock(
    ranks: Ranks,
    build: jobs.Build,
    wire: str = "float16",
    *,
    same: bool = True,
    tolerance: float | None = None,
    options: dict[str, object] | None = None,
    **more: Any,
) -> list[Outcome]:
    """Train stock and compiled, both in float32, and compare; return the compiled outcomes."""
    (start, _) = train(ranks, build, **{**more, "num_steps": 0})
    stock = train(ranks, build, **more)
    given = {"dtype": "float32", "wire_dtype": wire, **(options or {})}
    found = train(ranks, build, given, **more)
    for one, other in zip(found, stock, strict=True):
        assert_trains_as(one, other, start, tolerance or WIRES[wire])
    if same:
        assert_same_on_all_ranks(found)
    return found


def assert_same_on_all_ranks(found: list[Outcome]) -> None:
    one, other = found
    assert all(torch.equal(value, other.params[name]) for name, value in one.params.items())


@pytest.mark.parametrize("wire", WIRES)
def test_twenty_clipped_steps_train_as_stock_within_the_rounding_of_the_wire(
    ranks: Ranks, wire: str
) -> None:
    found = check_as_stock(ranks, jobs.plain, wire, num_steps=20)
    report = found[0].report
    assert report.whole == ["region 0 > SGD update, clipping inside"]
    (sync,) = report.syncs
    assert (sync.wire, sync.num_backwards, sync.num_resent) == (wire, 20, 0)
    norm = report.updates[0].kernels[0]
    assert norm.bytes_read == 510 * (4 if wire == "float32" else 2)  # the bucket as it is


def test_default_wire_is_the_dtype_of_the_step(ranks: Ranks) -> None:
    found = train(ranks, jobs.plain, {})
    (sync,) = found[0].report.syncs
    assert (sync.wire, sync.bytes_a_parameter) == ("bfloat16", 2.0)
    assert_same_on_all_ranks(found)


def test_sequential_inside_ddp_is_compiled(ranks: Ranks) -> None:
    found = train(ranks, jobs.sequential, {})
    assert any("bf16" in region.ops_after.ops for region in found[0].report.regions)
    check_as_stock(ranks, jobs.sequential)


def test_disabled_pass_leaves_stock_float32_on_the_wire(ranks: Ranks) -> None:
    found = train(ranks, jobs.plain, {"dtype": "float32", "disable": ["bucket-allreduce"]})
    (sync,) = found[0].report.syncs
    assert sync.sender == "stock DDP: bucket-allreduce is disabled"
    stock = train(ranks, jobs.plain)
    assert_trains_as(found[0], stock[0], stock[0], 0.0)


def test_accumulation_reduces_once_a_step(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.accumulating)
    assert len(found[0].report.whole) == 1
    (sync,) = found[0].report.syncs
    assert sync.num_backwards == 4


def test_unused_parameters_train_as_stock(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.branching, num_steps=6)
    assert not found[0].report.whole
    assert "find_unused_parameters: ranks may use other" in str(found[0].report.breaks)


def test_tied_and_frozen_parameters_train_as_stock(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.static_unused)
    assert len(found[0].report.whole) == 1


def test_static_graph_trains_as_stock(ranks: Ranks) -> None:
    check_as_stock(ranks, jobs.plain, ddp={"static_graph": True})


def test_gradients_that_are_views_of_buckets_train_as_stock(ranks: Ranks) -> None:
    check_as_stock(ranks, jobs.accumulating, ddp={"gradient_as_bucket_view": True})


def test_buckets_of_the_instance_are_used_as_they_are(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.plain, ddp={"bucket_cap_mb": 0.0005})
    (sync,) = found[0].report.syncs
    assert len(sync.buckets) > 1
    assert sum(bucket.num_elements for bucket in sync.buckets) == 510


def test_several_dtypes_keep_theirs_on_the_wire(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.several_dtypes, tolerance=WIRES["bfloat16"])
    (sync,) = found[0].report.syncs
    wires = {(bucket.dtype, bucket.wire) for bucket in sync.buckets}
    assert wires == {
        (torch.float32, torch.float16),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    }


def test_buffers_are_broadcast_as_stock(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.with_buffers)
    assert len(found[0].report.whole) == 1
    stock = train(ranks, jobs.with_buffers)
    for name, buffer in stock[1].buffers.items():
        torch.testing.assert_close(found[1].buffers[name], buffer, rtol=1e-2, atol=1e-3)


def test_two_modules_each_reduce_their_own(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.two_modules)
    assert len(found[0].report.whole) == 1
    assert [sync.module for sync in found[0].report.syncs] == ["Linear", "Net"]


def test_module_that_is_reduced_twice_in_a_step_trains_as_stock(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.adversarial)
    assert len(found[0].report.whole) == 1
    counts = {sync.module: sync.num_backwards for sync in found[0].report.syncs}
    assert counts == {"Net": 8, "Linear": 4}
    (bucket, again) = next(s.buckets for s in found[0].report.syncs if s.module == "Net")
    assert (bucket.names, bucket.turn, again.turn) == (again.names, 0, 1)


def test_gradients_that_stay_visible_are_means(ranks: Ranks) -> None:
    one, other = check_as_stock(ranks, jobs.visible)
    (stock, _) = train(ranks, jobs.visible)
    assert len(one.report.whole) == 1
    assert one.losses == other.losses == pytest.approx(stock.losses, rel=1e-3)


def test_two_forwards_before_one_backward_train_as_stock(ranks: Ranks) -> None:
    found = check_as_stock(ranks, jobs.twice)
    assert len(found[0].report.whole) == 1


def test_subgroup_averages_within_itself(ranks: Ranks) -> None:
    one, other = check_as_stock(ranks, jobs.subgroup, same=False)
    assert not torch.equal(
        one.params["0.module.readout.weight"], other.params["0.module.readout.weight"]
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (jobs.sparse, "sparse gradients; build it with sparse=False"),
        (jobs.hooked, "communication hook .*allreduce_hook.* decides"),
        (jobs.joined, r"join\(\): ranks that ran out"),
    ],
)
def test_what_we_cannot_send_goes_as_stock_with_a_warning(
    ranks: Ranks, build: jobs.Build, reason: str
) -> None:
    found = check_as_stock(ranks, build, "float16")
    (sync,) = found[0].report.syncs
    assert sync.sender.startswith("stock DDP: ")
    (warned,) = (text for text in found[0].warned if "wire" in text)
    assert re.search(reason, warned)
    stock = train(ranks, build)
    assert_trains_as(found[0], stock[0], stock[0], 0.0)
