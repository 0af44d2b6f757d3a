"""Graphs that run op by op know how kernels lay out what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from tests.steps import compile_step


class OverFeatures(nn.Module):
    """Batch norm of features that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


def _run(function: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = function(x)
    return result


@pytest.mark.parametrize("norms", [1, 2])
def test_dropout_behind_batch_norm_of_a_transposed_tensor_is_eagers(norms: int) -> None:
    torch.manual_seed(0)
    layers = [OverFeatures() for _ in range(norms)]
    model = nn.Sequential(*layers, nn.RMSNorm(8), nn.Dropout(0.3))
    x = torch.randn(2, 6, 8, requires_grad=True)
    expected = _run(model, x)
    found = _run(compile_step(lambda x: model(x), dtype="float32"), x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_input_of_batch_norm_may_be_given_by_name() -> None:
    def normed(x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        out = F.batch_norm(input=turned, running_mean=None, running_var=None, training=True)
        return F.dropout(F.rms_norm(out.transpose(1, 2), (8,)), 0.3)

    x = torch.randn(2, 6, 8, requires_grad=True)
    assert torch.equal(_run(compile_step(normed, dtype="float32"), x), _run(normed, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dense_input_of_batch_norm_needs_no_copy(layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).to(memory_format=layout)  # type: ignore[call-overload]
    compiled = compile_step(lambda x: model(x), dtype="float32")
    x = torch.randn(2, 2, 5, 5).contiguous(memory_format=layout)
    assert torch.equal(_run(compiled, x), _run(model, x))
    (region,) = last_report(compiled).regions
    assert "clone" not in region.aten_after
