from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.capture.remedies import repeated_masks
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with

_GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(9, 4, generator=_GENERATOR), torch.randn(9, 5, generator=_GENERATOR)
LABELS = torch.tensor([0, 3, 1, -1, 2, 0, -1, 4, 2])
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _inverted(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels < 1
    return F.mse_loss(out[~mask], y[~mask])


def _as_bool(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    weights = (labels > 0).float()
    return F.mse_loss(out[weights.bool()], y[weights.bool()])


def _of_two(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    wide = y.sum(1)
    return F.mse_loss(out[(labels >= 0) & ~wide.isnan()], y[(labels >= 0) & ~wide.isnan()])


def _by_masked_select(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    mask = (labels > 0).unsqueeze(1).expand_as(out)
    return F.mse_loss(out.masked_select(mask), torch.masked_select(y, mask))


def _of_each_entry(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return F.smooth_l1_loss(out[y != 0], y[y != 0]) + 0 * labels.sum()


def masked_program(loss: Loss) -> Program:
    model = nn.Linear(4, 5)
    return train_with(lambda x, y, labels: loss(model(x), y, labels), model)


MASKS = (_inverted, _as_bool, _of_two, _by_masked_select, _of_each_entry)


@pytest.mark.parametrize("loss", MASKS)
def test_loss_of_what_a_mask_selects_twice_is_in_the_graph(loss: Loss) -> None:
    check_whole(lambda: masked_program(loss), X, Y, LABELS)


@pytest.mark.parametrize("loss", [_inverted, _by_masked_select])
def test_masks_break_the_graph_without_the_remedy(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_masks, "is_traced_whole", lambda: False)
    reason = "Could not guard on data-dependent expression"
    check_breaks(lambda: masked_program(loss), X, Y, LABELS, reason=reason)


def _source_is_written(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels < 1
    first = out[~mask].sum()
    mask[0] = ~mask[0]
    return first - y[~mask].sum() * out[~mask].sum()


def _mask_is_written(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels < 1
    chosen, again = ~mask, ~mask
    chosen[0] = ~chosen[0]
    return out[chosen].sum() + (out[again].sum() * y[~mask].sum()).sin()


def _source_of_the_source_is_written(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    copy = labels.clone()
    first = out[~(copy < 1)].sum()
    copy[1] = 0
    return first + out[~(copy < 1)].square().sum()


def _data_of_the_source_is_written(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    copy = labels.clone()
    first = out[~(copy < 1)].sum()
    copy.data[1] = 0
    return first + out[~(copy < 1)].square().sum()


WRITES = (
    _source_is_written,
    _mask_is_written,
    _source_of_the_source_is_written,
    _data_of_the_source_is_written,
)


@pytest.mark.parametrize("loss", WRITES)
def test_mask_is_made_anew_where_something_was_written_to(loss: Loss) -> None:
    check_whole(lambda: masked_program(loss), X, Y, LABELS)


def test_mask_of_each_row_under_vmap_is_left_alone() -> None:
    def loss(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        def distance(one: Tensor, other: Tensor) -> Tensor:
            return torch.where(~(other > 0), one - other, (other > 0) * one).square().sum()

        return torch.func.vmap(distance)(out, y).mean()

    check_whole(lambda: masked_program(loss), X, Y, LABELS)


def test_mask_that_selects_by_broadcasting_is_left_alone() -> None:
    def loss(out: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        return out.masked_select((labels > 0).unsqueeze(1)).square().mean()

    check_whole(lambda: masked_program(loss), X, Y, LABELS)
