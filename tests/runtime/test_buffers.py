"""Snapshots of buffers: put back if the step is skipped, left alone if not."""

from __future__ import annotations

import torch
from torch import Tensor

from mpcompile.runtime.buffers import BufferSnapshots

SKIP, TAKE = torch.tensor(True), torch.tensor(False)


def everyone(region: object) -> bool:
    return True


def written(snapshots: BufferSnapshots, buffer: Tensor, region: object = None) -> None:
    """Keep ``buffer`` and write to it, as a forward does."""
    snapshots.keep([buffer], region)
    buffer.add_(1)


def test_buffer_is_put_back_if_the_step_is_skipped() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, everyone)
    assert buffer.tolist() == [1, 1]
    written(snapshots, buffer)
    snapshots.settle(SKIP, everyone)
    assert buffer.tolist() == [1, 1]


def test_first_of_several_forwards_counts() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros((), dtype=torch.int64)
    written(snapshots, buffer)
    written(snapshots, buffer)
    snapshots.settle(SKIP, everyone)
    assert buffer == 0


def test_second_update_of_a_step_puts_back_too() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, everyone)
    snapshots.settle(SKIP, everyone)
    assert buffer.tolist() == [0, 0]


def test_forward_behind_an_update_is_kept_anew() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, everyone)
    written(snapshots, buffer)
    snapshots.settle(SKIP, everyone)
    assert buffer.tolist() == [1, 1]


def test_what_happens_between_steps_stays() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(2)
    written(snapshots, buffer)
    snapshots.settle(TAKE, everyone)
    snapshots.forget()
    buffer.fill_(7)  # load_state_dict, say
    snapshots.settle(SKIP, everyone)
    assert buffer.tolist() == [7, 7]
    written(snapshots, buffer)
    snapshots.settle(SKIP, everyone)
    assert buffer.tolist() == [7, 7]


def test_buffers_of_other_graphs_stay() -> None:
    snapshots, one, two = BufferSnapshots(), torch.zeros(1), torch.zeros(1)
    written(snapshots, one, "one")
    written(snapshots, two, "two")
    snapshots.settle(SKIP, lambda region: region == "one")
    assert (one.item(), two.item()) == (0, 1)


def test_buffer_that_is_gone_is_dropped() -> None:
    snapshots, buffer = BufferSnapshots(), torch.zeros(1)
    written(snapshots, buffer)
    del buffer
    snapshots.settle(SKIP, everyone)
    snapshots.forget()
    assert not snapshots._kept
