"""The op that stands for an update in a graph, and its handle."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mpcompile.errors import CaptureError
from mpcompile.runtime import ops
from mpcompile.runtime.grads import ClipNorm, ClipValue, GradPlan
from mpcompile.runtime.updates import Updates
from tests.runtime.updating import parameters, relative_difference, set_grads


def test_op_updates_from_given_gradients() -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params) for params in lists]
    updates = Updates()
    handle = updates.of(pair[1]).handle
    for step in range(3):
        set_grads(step, *lists)
        pair[0].step()
        grads = [param.grad for param in lists[1]]
        for param in lists[1]:
            param.grad = None
        given = [position % 2 == 0 or step < 2 for position in range(len(grads))]
        for param, grad, is_given in zip(lists[1], grads, given, strict=True):
            param.grad = None if is_given else grad
        torch.ops.mpcompile.update(handle, grads, given)
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("write", [False, True])
def test_update_clips(write: bool) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params) for params in lists]
    updates = Updates()
    handle = updates.of(pair[1]).handle
    plan = GradPlan(clips=(ClipValue(1.5), ClipNorm(2.0)), write=write)
    for step in range(4):
        set_grads(step, *lists)
        torch.nn.utils.clip_grad_value_(lists[0], 1.5)
        norm = torch.nn.utils.clip_grad_norm_(lists[0], 2.0)
        pair[0].step()
        grads = [param.grad for param in lists[1]]
        outcome = ops.run_update(handle, grads, [True] * len(grads), plan)
        assert outcome.norm is not None
        torch.testing.assert_close(outcome.norm, norm, rtol=1e-6, atol=0.0)
        same = torch.allclose(lists[0][2].grad, lists[1][2].grad)  # type: ignore[arg-type]  # set
        assert same == write
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clip_ops_are_those_of_torch(order: float) -> None:
    lists = [parameters(), parameters()]
    set_grads(0, *lists)
    grads = [param.grad for param in lists[1] if param.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(lists[0], 0.5, order)
    assert torch.equal(torch.ops.mpcompile.clip_grad_norm_(grads, 0.5, order), norm)
    torch.nn.utils.clip_grad_value_(lists[0], 0.01)
    torch.ops.mpcompile.clip_grad_value_(grads, 0.01)
    for param, other in zip(*lists, strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=0, atol=0)


def test_handle_is_a_hash_of_content() -> None:
    def handle(cls: Any = torch.optim.AdamW, shape: tuple[int, ...] = (3,), **options: Any) -> str:
        return ops.content_hash(cls([torch.nn.Parameter(torch.zeros(shape))], **options))

    assert handle() == handle(lr=0.5, weight_decay=0.0)
    others = [handle(torch.optim.Adam), handle(shape=(4,)), handle(amsgrad=True)]
    assert len({handle(), *others}) == 4


def test_equal_optimizers_have_handles_of_their_own() -> None:
    updates = Updates()
    pair = [torch.optim.SGD(parameters(), lr=0.1) for _ in range(2)]
    assert updates.of(pair[0]).handle != updates.of(pair[1]).handle


def test_handle_of_a_freed_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    updates = Updates()
    handle = updates.of(optimizer).handle
    del optimizer
    gc.collect()
    with pytest.raises(CaptureError, match="no optimizer has the handle"):
        torch.ops.mpcompile.update(handle, [], [])
