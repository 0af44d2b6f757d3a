"""Ranks that disagree are found; what we set on an instance is gone when our call is over."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpcompile
from mpcompile.backend import last_report
from mpcompile.capture.ddp import GradientSync
from mpcompile.capture.session import session_of
from mpcompile.distributed.agreement import checksum
from mpcompile.errors import SyncError
from tests.distributed import jobs
from tests.distributed.ranks import Ranks
from tests.steps import compile_step

pytestmark = pytest.mark.distributed

IN_GRAPH = "the graph of the whole step"


def build(**ddp: Any) -> tuple[DistributedDataParallel, Any]:
    """Return a wrapped model and a plain step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(jobs.Net(), **ddp)
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, step


def gradients(model: Any, rank: int) -> list[Tensor]:
    """Return the gradients of one eager backward."""
    model.zero_grad()
    x, labels = jobs.labelled(50, rank)
    F.cross_entropy(model(x), labels).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def sync_of(compiled: Any) -> GradientSync:
    session = session_of(compiled)
    assert session is not None
    return session.sync


def message(function: Any, *args: Any) -> str:
    """Return the text of the SyncError that ``function`` raises."""
    with pytest.raises(SyncError) as caught:
        function(*args)
    return str(caught.value)


# --- what the ranks run ---------------------------------------------------------------------------


def use_eagerly_afterwards(rank: int) -> tuple[bool, str]:
    stock, _ = build()
    model, step = build()
    compiled = compile_step(step, wire_dtype="float16")
    compiled(*jobs.labelled(0, rank))
    stock.load_state_dict(model.state_dict())
    pairs = zip(gradients(model, rank), gradients(stock, rank), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    return same, str(model._get_ddp_logging_data().get("comm_hook", ""))


def register_hook_afterwards(rank: int) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, step = build()
    compiled = compile_step(step, wire_dtype="bfloat16")
    compiled(*jobs.labelled(0, rank))
    model.register_comm_hook(None, fp16_compress_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(*jobs.labelled(1, rank))
    return any("fp16_compress_hook" in str(w.message) for w in caught)


def raise_between_forward_and_backward(rank: int) -> bool:
    stock, _ = build()
    model, _ = build()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        model(x)
        torch._dynamo.graph_break()
        raise KeyError("the user's")

    with pytest.raises(KeyError):
        compile_step(step, wire_dtype="float16")(*jobs.labelled(0, rank))
    pairs = zip(gradients(model, rank), gradients(stock, rank), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def compile_model_only(rank: int) -> tuple[str, bool, bool]:
    stock, _ = build()
    model, _ = build()
    compiled = torch.compile(
        model,
        backend="mpcompile",
        options={"lowering": "eager", "dtype": "float32", "wire_dtype": "float16"},
    )
    ours, expected = gradients(compiled, rank), gradients(stock, rank)
    close = all((a - b).norm() < 1e-3 * b.norm() for a, b in zip(ours, expected, strict=True))
    rounded = not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    (sync,) = last_report(compiled).syncs
    return sync.wire, close, rounded


def leave_a_forward_without_backward(rank: int) -> bool:
    stock, _ = build()
    model, _ = build()
    compiled = torch.compile(
        model, backend="mpcompile", options={"lowering": "eager", "wire_dtype": "float16"}
    )
    compiled(jobs.labelled(0, rank)[0])
    pairs = zip(gradients(model, rank), gradients(stock, rank), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def compile_inside_ddp(rank: int) -> list[str]:
    compiled = torch.compile(
        jobs.Net(), backend="mpcompile", options={"lowering": "eager", "wire_dtype": "float16"}
    )
    model = DistributedDataParallel(compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(model, rank)
    return [str(w.message) for w in caught if "wire_dtype" in str(w.message)]


def evaluate(rank: int) -> int:
    model, step = build()
    compiled = compile_step(step)
    compiled(*jobs.labelled(0, rank))

    @torch.no_grad()
    def evaluation(x: Tensor) -> Tensor:
        logits: Tensor = model(x)
        return logits

    compile_step(evaluation)(jobs.labelled(1, rank)[0])
    compiled(*jobs.labelled(2, rank))
    (sync,) = last_report(compiled).syncs
    return int(sync.num_backwards)


def drift(rank: int, check_sync: Any, at_step: int) -> tuple[int, str]:
    """Change a parameter on one rank only; return at which step it is found, and the message."""
    model, step = build()
    compiled = compile_step(step, check_sync=check_sync)
    for number in range(6):
        if number == at_step and rank == 1:
            with torch.no_grad():
                model.module.norm.weight[3] += 1e-6
        try:
            compiled(*jobs.labelled(number, rank))
        except SyncError as error:
            return number, str(error)
    return -1, ""


def use_other_options(rank: int) -> str:
    _, step = build()
    wire = "float16" if rank == 0 else "bfloat16"
    return message(compile_step(step, wire_dtype=wire), *jobs.labelled(0, rank))


def use_environment_of_its_own(rank: int) -> str:
    _, step = build()
    if rank == 1:
        os.environ["MPCOMPILE_ERROR_FEEDBACK"] = "on"
    try:
        return message(compile_step(step), *jobs.labelled(0, rank))
    finally:
        os.environ.pop("MPCOMPILE_ERROR_FEEDBACK", None)


def overflow(rank: int) -> tuple[list[float], int, list[Tensor]]:
    """Gradients of 5e4 that grow to where their float16 sum overflows."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4, bias=False))
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []

    def step(x: Tensor, factor: Tensor) -> Tensor:
        loss: Tensor = (model(x) * factor).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    compiled = compile_step(step, dtype="float32", wire_dtype="float16", check_sync=1)
    for factor in (1e-7, 5e4, 1e6, 1e5):
        compiled(torch.ones(1, 8) * (1 + rank), torch.tensor(factor))
        seen.append(float(model.module.weight.grad[0, 0]) / factor)
        model.zero_grad()
    (sync,) = last_report(compiled).syncs
    assert sync.sender == IN_GRAPH
    return seen, sync.num_resent, [p.detach().clone() for p in model.parameters()]


def feed_back(rank: int, error_feedback: bool) -> float:
    """Return what is missing of the sum of many gradients that bfloat16 rounds down."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    total = torch.zeros(1, 4)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    compiled = compile_step(
        step, dtype="float32", wire_dtype="bfloat16", error_feedback=error_feedback
    )
    x = torch.full((1, 4), 1 + 2**-10)  # rounds to 1 on every rank; the sum is exact
    for _ in range(64):
        compiled(x)
        total += model.module.weight.grad
        model.zero_grad()
    assert last_report(compiled).syncs[0].sender == IN_GRAPH
    return float((total - 64 * (1 + 2**-10)).abs().max())


def resume_feedback(rank: int) -> tuple[bool, list[str]]:
    """Resume after three steps from saved state; whether it goes on as if never stopped."""
    model, step = build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"dtype": "float32", "wire_dtype": "bfloat16"}
    compiled = compile_step(step, error_feedback=True, **options)
    for number in range(3):
        compiled(*jobs.labelled(number, rank))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = mpcompile.state_dict(compiled)
    for number in range(3, 6):
        compiled(*jobs.labelled(number, rank))
    expected = [p.detach().clone() for p in model.parameters()]

    again, step = build()
    assert all(torch.equal(value, start[name]) for name, value in again.state_dict().items())
    again.load_state_dict(saved)
    compiled = compile_step(step, error_feedback=True, **options)
    mpcompile.load_state_dict(compiled, state)
    assert (
        mpcompile.state_dict(compiled)["sync"][0]["residuals"].keys()
        == dict(again.module.named_parameters()).keys()
    )
    for number in range(3, 6):
        compiled(*jobs.labelled(number, rank))
    assert last_report(compiled).syncs[0].sender == IN_GRAPH
    same = all(torch.equal(a, b) for a, b in zip(again.parameters(), expected, strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (entry,) = state["sync"]
        mpcompile.load_state_dict(compiled, {**state, "sync": [{**entry, "rank": 1 - rank}]})
    return same, [str(w.message) for w in caught]


def plan_of(rank: int, *wires: str) -> Any:
    _, step = build(bucket_cap_mb=0.0005)
    compiled = compile_step(step, wire_dtype=wires[0])
    for number in range(2):
        compiled(*jobs.labelled(number, rank))
    return str(last_report(compiled))


def agree(rank: int) -> tuple[bool, bool]:
    _, step = build()
    compiled = compile_step(step)
    compiled(*jobs.labelled(0, rank))
    sync = sync_of(compiled)
    return (
        bool(sync.agree_on(torch.tensor(rank == 1))),
        bool(sync.agree_on(torch.tensor(False))),
    )


# --- the tests ------------------------------------------------------------------------------------


def test_eager_use_afterwards_is_stock(ranks: Ranks) -> None:
    assert ranks.run(use_eagerly_afterwards) == [(True, "")] * 2


def test_users_hook_can_still_be_registered_afterwards(ranks: Ranks) -> None:
    assert ranks.run(register_hook_afterwards) == [True, True]


def test_step_that_raises_leaves_the_instance_as_stock(ranks: Ranks) -> None:
    assert ranks.run(raise_between_forward_and_backward) == [True, True]


def test_model_compiled_alone_sends_sixteen_bits_too(ranks: Ranks) -> None:
    assert ranks.run(compile_model_only) == [("float16", True, True)] * 2


def test_forward_without_backward_leaves_the_instance_as_stock(ranks: Ranks) -> None:
    assert ranks.run(leave_a_forward_without_backward) == [True, True]


def test_module_compiled_inside_ddp_warns_that_the_wire_is_stock(ranks: Ranks) -> None:
    for warned in ranks.run(compile_inside_ddp):
        (text,) = warned
        assert "is inside DistributedDataParallel; compile the step" in text


def test_evaluation_between_steps_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(evaluate) == [2, 2]


@pytest.mark.parametrize(
    ("check_sync", "at_step", "found"),
    [("first-step", 0, 0), ("first-step", 2, -1), ("off", 0, -1), (2, 2, 3), (1, 4, 4)],
)
def test_drifting_parameter_is_found_when_it_is_looked_for(
    ranks: Ranks, check_sync: Any, at_step: int, found: int
) -> None:
    for number, text in ranks.run(drift, check_sync, at_step):
        assert number == found
        assert ("parameter norm.weight (24,) is the first of" in text) == (found >= 0)


def test_ranks_with_other_options_are_told_apart_before_the_first_bucket(ranks: Ranks) -> None:
    for text in ranks.run(use_other_options):
        assert "rank 0 has 'bucket 0: float16:', rank 1 has 'bucket 0: bfloat16:'" in text


def test_rank_with_an_environment_of_its_own_is_told(ranks: Ranks) -> None:
    for text in ranks.run(use_environment_of_its_own):
        assert "'error_feedback: False', rank 1 has 'error_feedback: True'" in text


def test_sum_that_overflows_float16_is_sent_again_in_float32(ranks: Ranks) -> None:
    one, other = ranks.run(overflow)
    assert one[0] == pytest.approx([1.5] * 4, rel=2e-3)
    assert one[1] == other[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


def test_error_feedback_adds_up_what_is_rounded_off(ranks: Ranks) -> None:
    without, with_it = ranks.run(feed_back, False)[0], ranks.run(feed_back, True)[0]
    assert without > 0.05
    assert with_it < 0.01


def test_error_feedback_resumes_from_its_state_on_its_rank_only(ranks: Ranks) -> None:
    for same, warned in ranks.run(resume_feedback):
        assert same
        assert len(warned) == 1
        assert "was given the error feedback of rank" in warned[0]


def test_flag_of_one_rank_is_known_to_all(ranks: Ranks) -> None:
    assert ranks.run(agree) == [(True, False)] * 2


def test_report_lists_buckets_with_dtype_bytes_and_times(ranks: Ranks) -> None:
    text = ranks.run(plan_of, "float16")[0]
    assert "Gradients between ranks" in text
    assert "Net on 2 ranks" in text
    assert "2.00 a parameter" in text
    assert "f32 -> f16" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_checksum_changes_with_any_bit(dtype: torch.dtype) -> None:
    value = torch.ones(5, dtype=dtype)
    changed = value.clone()
    changed[2] += 0.01
    assert checksum(value) == checksum(value.clone())
    assert checksum(value) != checksum(changed)


def test_group_is_still_usable_after_a_disagreement(ranks: Ranks) -> None:
    assert ranks.run(_sum_of_ranks) == [1.0, 1.0]


def _sum_of_ranks(rank: int) -> float:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return float(value)
