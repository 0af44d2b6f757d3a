"""What one graph cannot do of DistributedDataParallel: it goes in regions, and the report says why.

Regions train as stock; what the wrapper alone can send goes as stock sends it, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpcompile.backend import last_report
from mpcompile.distributed import ddp_api
from mpcompile.errors import CaptureError
from tests.distributed import jobs
from tests.distributed.jobs import Job, Training
from tests.distributed.ranks import Ranks
from tests.distributed.test_ddp import check_as_stock, train
from tests.steps import compile_step

pytestmark = pytest.mark.distributed


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """This process as a rank of two that hand back what they are given."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def static_with_unused() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    ddp.find_unused_parameters = True  # of the constructor it warns that it need not be said
    return ddp


def with_sync_batch_norm() -> DistributedDataParallel:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    # The constructor refuses it on a CPU, so it is put in afterwards.
    ddp = DistributedDataParallel(net)
    net[1] = nn.SyncBatchNorm(2)
    return ddp


def with_a_hook() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_forward_hook(lambda *_: None)
    return ddp


def with_a_buffer_hook() -> DistributedDataParallel:
    ddp = DistributedDataParallel(jobs.Normed())
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    return ddp


def with_attribute(name: str, value: object) -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    setattr(ddp, name, value)  # not every torch has an argument for it
    return ddp


def frozen_later() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.module.bias.requires_grad_(False)
    return ddp


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: DistributedDataParallel(nn.Linear(2, 2)), ""),
        (
            lambda: DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True),
            "find_unused_parameters: ranks may use other parameters",
        ),
        (static_with_unused, ""),
        (with_sync_batch_norm, "SyncBatchNorm communicates in the middle of the model"),
        (with_a_hook, "hooks on DistributedDataParallel itself; register them on the module"),
        (with_a_buffer_hook, "buffers are not broadcast as they are by default"),
        (
            lambda: with_attribute("mixed_precision", object()),
            "mixed_precision of DistributedDataParallel casts parameters",
        ),
        (
            lambda: with_attribute("bucket_bytes_cap_list", [1, 2]),
            "bucket_cap_mb_list fits the buckets of its reducer only",
        ),
        (
            lambda: with_attribute("skip_all_reduce_unused_params", True),
            "skip_all_reduce_unused_params: its reducer finds out",
        ),
        (frozen_later, "requires_grad was changed after DistributedDataParallel was built"),
    ],
)
def test_reason_names_what_a_graph_cannot_do(
    one_of_two: None, build: Callable[[], DistributedDataParallel], reason: str
) -> None:
    found = ddp_api.graph_refusal(build())
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_frozen_after_wrapping_trains_as_stock_in_regions(ranks: Ranks) -> None:
    found = check_as_stock(
        ranks, jobs.tied_and_frozen, ddp={"find_unused_parameters": True, "static_graph": True}
    )
    assert not found[0].report.whole
    assert "requires_grad was changed after" in str(found[0].report.breaks)


def test_error_feedback_of_a_module_that_is_reduced_twice_goes_in_regions(ranks: Ranks) -> None:
    options: dict[str, object] = {"error_feedback": True}
    found = check_as_stock(ranks, jobs.adversarial, options=options)
    assert "error_feedback with several reductions" in str(found[0].report.breaks)
    assert {sync.wire for sync in found[0].report.syncs} == {"float16"}


def delay_reductions(rank: int, options: dict[str, object]) -> str:
    """The gradients of a norm are reduced by a hook on the parameter whose gradient comes last."""
    net = jobs.Net()
    model = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[(f"norm.{n}", p) for n, p in net.norm.named_parameters()],
        param_to_hook_all_reduce=net.read_in.weight,
    )
    compiled = compile_step(jobs._simple(model, jobs.labelled).step, **options)
    with pytest.raises(CaptureError) as caught:
        compiled(*jobs.labelled(0, rank))
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"capture": "regions"}, {"disable": ["bucket-allreduce"]}])
def test_delayed_all_reduces_are_refused(ranks: Ranks, options: dict[str, object]) -> None:
    for text in ranks.run(delay_reductions, options):
        assert "DistributedDataParallel(Net): delay_all_reduce_named_params" in text
        assert "Leave it out" in text


def ignoring(job: Job, rank: int) -> Training:
    """Each rank trains a norm of its own."""
    net = jobs.Net()
    ignored = ["norm.weight", "norm.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    return jobs._simple(jobs.wrap(job, net), jobs.labelled)


def test_parameters_that_are_left_to_each_rank_train_as_stock(ranks: Ranks) -> None:
    one, other = check_as_stock(ranks, ignoring, same=False)
    assert len(one.report.whole) == 1
    name = "0.module.norm.weight"
    assert not torch.equal(one.params[name], other.params[name])
    name = "0.module.readout.weight"
    assert torch.equal(one.params[name], other.params[name])


def own_buffers(job: Job, rank: int) -> Training:
    """Each rank keeps the statistics of its own batches."""
    training = jobs.with_buffers(Job(job.build, ddp={"broadcast_buffers": False}), rank)
    return training


def test_buffers_that_are_not_broadcast_stay_each_ranks_own(ranks: Ranks) -> None:
    found, stock = check_as_stock(ranks, own_buffers), train(ranks, own_buffers)
    name = "0.module.norm.running_mean"
    assert len(found[0].report.whole) == 1
    assert not torch.equal(found[0].buffers[name], found[1].buffers[name])
    for one, other in zip(found, stock, strict=True):
        torch.testing.assert_close(one.buffers[name], other.buffers[name], rtol=1e-2, atol=1e-3)


def evaluate_with_buffers(rank: int) -> tuple[list[str], bool]:
    """Evaluate a module whose buffers rank 0 hands out, with the step compiled as well."""
    torch.manual_seed(0)
    model = DistributedDataParallel(jobs.Normed())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def evaluation(x: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(x)
        return logits

    compiled, evaluated = compile_step(step), compile_step(evaluation, dtype="float32")
    compiled(*jobs.labelled(0, rank))
    model.eval()
    x = jobs.labelled(1, 0)[0]
    found = evaluated(x)
    expected = model(x).detach()
    reasons = [reason for reason, _ in last_report(evaluated).breaks]
    return reasons, torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_evaluation_that_broadcasts_buffers_goes_in_regions(ranks: Ranks) -> None:
    for reasons, same in ranks.run(evaluate_with_buffers):
        assert any("buffers are broadcast in evaluation" in reason for reason in reasons)
        assert same


def wrap_twice(rank: int) -> list[str]:
    """Two wrappers around one module: which of them reduces?"""
    torch.manual_seed(0)
    net = jobs.Net()
    one, other = DistributedDataParallel(net), DistributedDataParallel(net)

    def losses(x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            first = F.cross_entropy(one(x), labels)
            return first + F.cross_entropy(other(x), labels)

    compiled = compile_step(losses)
    compiled(*jobs.labelled(0, rank))
    return [reason for reason, _ in last_report(compiled).breaks]


def test_parameter_of_two_wrappers_breaks_the_graph(ranks: Ranks) -> None:
    for reasons in ranks.run(wrap_twice):
        assert any("a parameter belongs to two of" in reason for reason in reasons)


def groups_of_two(rank: int) -> Any:
    """Ranks 0 and 1 average, and so do 2 and 3."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job(jobs.plain, {"dtype": "float32", "wire_dtype": "float16"})
    found = {}
    for kind, options in (("ours", job.options), ("stock", None)):
        made = Job(jobs.plain, options, ddp={"process_group": pairs[rank // 2]})
        found[kind] = jobs.train(rank, made)
    return found["ours"].params, found["stock"].params, len(found["ours"].report.whole)


@pytest.mark.slow
def test_subgroups_average_within_themselves() -> None:
    four = Ranks(4)
    try:
        results = four.run(groups_of_two)
    finally:
        four.stop()
    for ours, stock, num_whole in results:
        assert num_whole == 1
        for name, value in ours.items():
            torch.testing.assert_close(value, stock[name], rtol=1e-2, atol=1e-3)
    for one, other in ((0, 1), (2, 3)):
        pairs = zip(results[one][0].values(), results[other][0].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(*(results[r][0]["0.module.readout.weight"] for r in (0, 2)))
