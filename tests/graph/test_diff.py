"""Diffs of two prints: op counts first, then the text."""

from __future__ import annotations

import torch
from torch import Tensor

from mpcompile.graph.diff import format_diff, op_counts
from mpcompile.graph.printer import format_graph
from tests.graph.trace import trace


def printed(dtype: torch.dtype) -> str:
    def function(x: Tensor) -> Tensor:
        return (x.to(dtype) @ x.to(dtype)).float()

    return format_graph(trace(function, torch.ones(2, 2)).graph)


def test_equal_prints_have_no_diff() -> None:
    assert format_diff(printed(torch.bfloat16), printed(torch.bfloat16)) == ""


def test_ops_are_counted_without_inputs() -> None:
    assert op_counts(printed(torch.bfloat16)) == {"aten._to_copy": 3, "aten.mm": 1}


def test_ops_with_several_results_are_counted() -> None:
    text = format_graph(trace(lambda x: torch.max(x, 1)[0], torch.ones(2, 3)).graph)
    assert op_counts(text) == {"aten.max": 1, "getitem": text.count("= getitem")}


def test_diff_names_ops_that_came_and_lines_that_changed() -> None:
    diff = format_diff(printed(torch.float32), printed(torch.bfloat16))
    assert diff.splitlines()[0] == "ops: aten._to_copy 0 -> 3"
    assert "+%mm: bf16[2,2] = aten.mm(%_to_copy, %_to_copy_1)" in diff.splitlines()
    assert "-%mm: f32[2,2] = aten.mm(%x_1, %x_1)" in diff.splitlines()


def test_diff_of_types_alone_says_so() -> None:
    diff = format_diff(printed(torch.float16), printed(torch.bfloat16))
    assert diff.splitlines()[0] == "ops: same ops, other types"
