"""Snapshots of buffers: put back if the step is skipped, left alone if not."""

from __future__ import annotations

import torch
from torch import Tensor

from mpcompile.runtime.buffers import BufferSnapshots

SKIP, TAKE = torch.tensor(True), torch.tensor(False)


ANY = None
ONE, TWO = frozenset([1]), frozenset([2])


def written(
    snapshots: BufferSnapshots, buffer: Tensor, params: frozenset[int] | None = None
) -> None:
    """Keep ``buffer`` and write to it, as a forward does."""
    snapshots.keep([buffer], params)
    buffer.add_(1)


def test_buffer_is_put_back_if_the_step_is_skipped() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, ANY)
    assert buffer.tolist() == [1, 1]
    written(snapshots, buffer)
    snapshots.settle(SKIP, ANY)
    assert buffer.tolist() == [1, 1]


def test_first_of_several_forwards_counts() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros((), dtype=torch.int64)
    written(snapshots, buffer)
    written(snapshots, buffer)
    snapshots.settle(SKIP, ANY)
    assert buffer == 0


def test_second_update_of_a_step_puts_back_too() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, ANY)
    snapshots.settle(SKIP, ANY)
    assert buffer.tolist() == [0, 0]


def test_forward_behind_an_update_is_kept_anew() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, ANY)
    written(snapshots, buffer)
    snapshots.settle(SKIP, ANY)
    assert buffer.tolist() == [1, 1]


def test_what_happens_between_steps_stays() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, ANY)
    snapshots.forget()
    buffer.fill_(7)  # load_state_dict, say
    snapshots.settle(SKIP, ANY)
    assert buffer.tolist() == [7, 7]
    written(snapshots, buffer)
    snapshots.settle(SKIP, ANY)
    assert buffer.tolist() == [7, 7]


def test_buffers_of_other_parameters_stay() -> None:
    snapshots, one, two, both, whole = BufferSnapshots(), *(torch.zeros(1) for _ in range(4))
    written(snapshots, one, ONE)
    written(snapshots, two, TWO)
    written(snapshots, both, TWO)
    written(snapshots, both, ONE)
    written(snapshots, whole)
    snapshots.settle(SKIP, ONE)
    assert (one.item(), two.item(), both.item(), whole.item()) == (0, 1, 0, 0)


def test_buffer_that_is_gone_is_dropped() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(1)
    written(snapshots, buffer)
    del buffer
    snapshots.settle(SKIP, ANY)
    snapshots.forget()
    assert not snapshots._kept
