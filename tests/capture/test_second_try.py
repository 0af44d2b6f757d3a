from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.capture.remedies.whole_steps import Program, check_breaks, compile_whole, train_with

BOXES = torch.tensor([[0, 1, 1, 8, 8], [1, 2, 3, 9, 12], [0, 0, 0, 5, 6]])


def crops() -> Program:
    """Cut boxes out of a map of features, as detectors do; their corners are read as ints."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    head = nn.Linear(8, 4)

    def loss_of(image: Tensor) -> Tensor:
        features = model(image)
        found = [
            features[index, :, top:bottom, left:right].mean((1, 2))
            for index, left, top, right, bottom in BOXES.tolist()
        ]
        return F.cross_entropy(head(torch.stack(found)), torch.tensor([0, 1, 2]))

    return train_with(loss_of, nn.ModuleList([model, head]))


def test_code_that_takes_no_symbols_runs_with_values_read_between_graphs() -> None:
    check_breaks(crops, torch.randn(2, 3, 16, 16), reason="values of tensors break the graph")


def test_report_has_the_line_that_takes_no_symbols() -> None:
    compiled = compile_whole(crops()[1])
    compiled(torch.randn(2, 3, 16, 16))
    lines, first = inspect.getsourcelines(crops)
    (offset,) = (at for at, line in enumerate(lines) if "features[index" in line)
    where = [line for reason, line in last_report(compiled).breaks if "values of tensors" in reason]
    assert where == [f"{__file__.rsplit('/', 1)[-1]}:{first + offset}"]
    assert last_report(compiled).regions


def test_error_of_the_step_itself_is_still_raised() -> None:
    model = nn.Linear(4, 4)
    compiled = compile_whole(train_with(lambda x: model(x).sum(), model)[1])
    with pytest.raises(Exception, match="fake tensor"):
        compiled(torch.randn(3, 5))
    assert last_report(compiled).breaks == []
