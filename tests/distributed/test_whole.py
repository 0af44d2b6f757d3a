"""A step with DistributedDataParallel as one graph: ranks that differ, what stays in regions."""

from __future__ import annotations

import contextlib
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile.backend import last_report
from mpcompile.distributed import ddp_api
from mpcompile.errors import SyncError
from tests.checking import assert_same
from tests.distributed import jobs
from tests.distributed.jobs import Job, Training
from tests.distributed.ranks import Ranks
from tests.distributed.test_ddp import check_as_stock
from tests.distributed.test_sync import build
from tests.steps import compile_step

pytestmark = pytest.mark.distributed


def printing(job: Job, rank: int) -> Training:
    """Rank 0 prints in the middle of the step, which breaks its graph."""
    model = jobs.wrap(job, jobs.Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        if rank == 0:
            print("loss", loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(step, [model], jobs.labelled)


def uneven(job: Job, rank: int) -> Training:
    """Rank 1 gets fewer samples in the third step, for which its step is compiled anew."""

    def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
        x, labels = jobs.labelled(number, rank)
        return (x[:5], labels[:5]) if number == 2 and rank == 1 else (x, labels)

    training = jobs.plain(job, rank)
    return Training(training.step, training.modules, batch)


def looking(job: Job, rank: int) -> Training:
    """Rank 0 looks at a gradient, in its graph, so its clipping is a step of its own there."""
    model = jobs.wrap(job, jobs.Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen = model.module.readout.weight.grad.norm() if rank == 0 else loss
        opt.step()
        opt.zero_grad()
        return seen.detach()

    return Training(step, [model], jobs.labelled)


def judging(job: Job, rank: int) -> Training:
    """A judge whose gradients from the generator's backward are cleared, unread."""
    generator, judge = jobs.wrap(job, nn.Linear(12, 12)), jobs.wrap(job, jobs.Net())
    first = torch.optim.SGD(judge.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(x)
        loss = F.cross_entropy(judge(x), labels) - 0.1 * F.cross_entropy(judge(fake), labels)
        loss.backward()
        first.step()
        first.zero_grad()
        F.cross_entropy(judge(generator(x)), labels).backward()
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss.detach()

    return Training(step, [generator, judge], jobs.labelled)


def print_later(rank: int) -> str:
    """Rank 0 prints in its third step, when both have had two as one graph."""
    model = DistributedDataParallel(jobs.Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor, prints: bool) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        if prints:
            print("loss", loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step)
    for number in range(2):
        compiled(*jobs.labelled(number, rank), False)
    assert last_report(compiled).whole
    with pytest.raises(SyncError) as caught:
        compiled(*jobs.labelled(2, rank), rank == 0)
    return str(caught.value)


def leave_parameters_out(rank: int) -> list[str]:
    """A step that does not use all parameters, though nothing was said of it."""
    model = DistributedDataParallel(jobs.Branching())
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step)
    compiled(*jobs.labelled(0, rank))
    with pytest.raises(RuntimeError, match="find_unused_parameters=True") as caught:
        compiled(*jobs.labelled(1, rank))
    breaks = [reason for reason, _ in last_report(compiled).breaks]
    return [str(caught.value), *breaks]


def evaluate_between(rank: int, with_grad: bool) -> tuple[int, bool]:
    """Train as one graph, with an eager forward of rank 0 alone in between."""
    model, step = build()
    compiled = compile_step(step)
    for number in range(4):
        compiled(*jobs.labelled(number, rank))
        if rank == 0:
            with torch.set_grad_enabled(with_grad):
                model.module(jobs.labelled(9, rank)[0])
    report = last_report(compiled)
    return len(report.whole), any("one graph" in line for line, _ in report.breaks)


def train_outside_too(rank: int) -> bool:
    """Train as one graph, then eagerly, then as one graph again; compare with stock throughout."""
    ours, step = build()
    compiled = compile_step(step, dtype="float32", wire_dtype="float32")
    stock, eager = build()
    for number in range(6):
        batch = jobs.labelled(number, rank)
        (step if number in (2, 3) else compiled)(*batch)
        eager(*batch)
    pairs = zip(ours.parameters(), stock.parameters(), strict=True)
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs)


def leave_backward_outside(rank: int) -> tuple[bool, list[str]]:
    """Compile the loss, call backward eagerly: DDP's reducer has to do its work."""
    model, _ = build()
    stock, _ = build()

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels)

    compiled = compile_step(loss_of, dtype="float32", wire_dtype="float32")
    x, labels = jobs.labelled(0, rank)
    compiled(x, labels).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    F.cross_entropy(stock(x), labels).backward()
    expected = [p.grad for p in stock.parameters() if p.grad is not None]
    pairs = zip(found, expected, strict=True)
    same = all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)
    return same, [reason for reason, _ in last_report(compiled).breaks]


def accumulate(rank: int, is_compiled: bool) -> tuple[list[Tensor], int]:
    """Return the gradients of two backwards each, the first under ``no_sync``; how many graphs."""
    model, _ = build()

    def backward(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        return loss.detach()

    compiled = compile_step(backward, dtype="float32", wire_dtype="float32")
    found = []
    for number in range(4):
        with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            (compiled if is_compiled else backward)(*jobs.labelled(number, rank))
        if number % 2:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    return found, len(last_report(compiled).regions)


def move_inputs(rank: int) -> list[str]:
    """A wrapper that would move its inputs to another device."""
    _, step = build()
    found = torch.device("meta")
    with unittest.mock.patch.object(ddp_api, "input_device", return_value=found):
        compiled = compile_step(step)
        compiled(*jobs.labelled(0, rank))
    return [reason for reason, _ in last_report(compiled).breaks]


def train_without_a_backend_for_cpus(rank: int) -> tuple[str, int, bool]:
    """Compare what is sent in a group of its own, as with NCCL."""
    model, step = build()
    with unittest.mock.patch.object(ddp_api, "moves_cpu_tensors", return_value=False):
        compiled = compile_step(step)
        for number in range(2):
            compiled(*jobs.labelled(number, rank))
        group = ddp_api.words_group(model)
    stock = model.process_group
    same_timeout = ddp_api._timeout(group) == ddp_api._timeout(stock)
    return dist.get_backend(group), group.size(), same_timeout and group is not stock


def hook_the_wrapper(rank: int) -> tuple[int, int, list[str]]:
    """Register a hook on the wrapper after a step; how often it is called in the next two."""
    model, step = build()
    compiled = compile_step(step, check="off")
    compiled(*jobs.labelled(0, rank))
    num_whole = len(last_report(compiled).whole)
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    for number in range(2):
        compiled(*jobs.labelled(number, rank))
    return num_whole, len(called), [reason for reason, _ in last_report(compiled).breaks]


def test_print_on_one_rank_has_all_go_in_regions(ranks: Ranks) -> None:
    one, other = check_as_stock(ranks, printing)
    assert not one.report.whole
    assert not other.report.whole
    assert "another rank has it in regions" in str(other.report.breaks)


def test_ranks_that_would_round_differently_go_in_regions(ranks: Ranks) -> None:
    for outcome in check_as_stock(ranks, looking, "float32", same=False):
        assert "update" not in str(outcome.report.whole)
        assert "another rank has it in regions, or sends" in str(outcome.report.breaks)


def test_reduction_that_nobody_reads_is_left_out(ranks: Ranks) -> None:
    found = check_as_stock(ranks, judging)
    assert len(found[0].report.whole) == 1
    counts = {sync.module: sync.num_backwards for sync in found[0].report.syncs}
    assert counts == {"Net": 4, "Linear": 4}


def test_rank_with_another_batch_size_still_fits(ranks: Ranks) -> None:
    one, other = check_as_stock(ranks, uneven)
    assert len(one.report.whole) == 1
    assert len(other.report.whole) == 2


def test_rank_that_leaves_its_graph_later_is_an_error_on_all(ranks: Ranks) -> None:
    for text in ranks.run(print_later):
        assert "rank 0 has 'step: in regions', rank 1 has 'step: one graph'" in text
        assert "options={'capture': 'regions'}" in text


def test_parameters_that_are_left_out_are_stock_torchs_error(ranks: Ranks) -> None:
    for found in ranks.run(leave_parameters_out):
        assert any("branch.weight of Branching gets no gradient" in text for text in found)


@pytest.mark.parametrize("with_grad", [True, False])
def test_rank_may_use_the_module_inside_alone(ranks: Ranks, with_grad: bool) -> None:
    assert ranks.run(evaluate_between, with_grad) == [(1, False)] * 2


def test_inputs_that_the_wrapper_moves_break_the_graph(ranks: Ranks) -> None:
    for breaks in ranks.run(move_inputs):
        assert any("the wrapper moves inputs to its device" in reason for reason in breaks)


def test_group_without_a_backend_for_cpus_gets_one_over_gloo(ranks: Ranks) -> None:
    assert ranks.run(train_without_a_backend_for_cpus) == [("gloo", 2, True)] * 2


def test_hook_that_the_wrapper_gets_later_is_called(ranks: Ranks) -> None:
    for num_whole, num_called, breaks in ranks.run(hook_the_wrapper):
        assert (num_whole, num_called) == (1, 2)
        assert any("hooks on DistributedDataParallel itself" in reason for reason in breaks)


def test_eager_steps_in_between_train_as_stock(ranks: Ranks) -> None:
    assert ranks.run(train_outside_too) == [True, True]


def test_backward_outside_the_function_is_reduced_as_stock(ranks: Ranks) -> None:
    for same, breaks in ranks.run(leave_backward_outside):
        assert same
        assert any(
            "DistributedDataParallel(Net) is called, its backward" in text for text in breaks
        )


def test_no_sync_around_the_compiled_step_accumulates(ranks: Ranks) -> None:
    stock = ranks.run(accumulate, False)
    for (found, num_graphs), (expected, _) in zip(ranks.run(accumulate, True), stock, strict=True):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)
        assert num_graphs == 2  # with and without reductions
