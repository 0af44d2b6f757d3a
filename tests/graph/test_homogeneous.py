"""Which ops pass a factor on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompile.graph.homogeneous import passes_factor_on
from tests.checking import trace_function

Function = Callable[[Tensor, Tensor], Tensor]


def mask() -> Tensor:
    """Made inside of what is traced."""
    return torch.ones(2, 2).triu(1).bool()


def last_passes(function: Function) -> bool:
    """Whether the last op does, if the first input has a factor and what is made of it too."""
    graph = trace_function(function, [torch.ones(2, 2), torch.ones(2, 2)]).graph
    first, _ = graph.find_nodes(op="placeholder")
    scaled, last = {first}, first
    for node in graph.nodes:
        if node.op == "call_function" and scaled.intersection(node.all_input_nodes):
            last, passes = node, passes_factor_on(node, scaled)
            if node is not graph.output_node() and passes:
                scaled.add(node)
    return last in scaled


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: g * x,
        lambda g, x: x @ g,
        lambda g, x: g / x,
        lambda g, x: g + g * 2,
        lambda g, x: g.sum(),
        lambda g, x: g.norm(),
        lambda g, x: torch.where(mask(), g, torch.zeros(2, 2)),
        lambda g, x: torch.where(mask(), 0.0, g),
        lambda g, x: g.masked_fill(mask(), 0),
        lambda g, x: torch.maximum(g, 2 * g),
        lambda g, x: torch.cat([g, 2 * g]),
        lambda g, x: torch.stack([g, g]),
        lambda g, x: F.conv1d(g, x[:, :, None]),
    ],
)
def test_factor_passes(function: Function) -> None:
    assert last_passes(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: g * g,
        lambda g, x: g @ g,
        lambda g, x: x / g,
        lambda g, x: g + x,
        lambda g, x: g - 0.5,
        lambda g, x: g.clamp(-1, 1),
        lambda g, x: g > 0.5,
        lambda g, x: torch.where(mask(), g, x),
        lambda g, x: g.masked_fill(mask(), 1),
        lambda g, x: torch.maximum(g, x),
        lambda g, x: g.sign(),
        lambda g, x: F.conv1d(g, g[:, :, None]),
    ],
)
def test_factor_does_not_pass(function: Function) -> None:
    assert not last_passes(function)
