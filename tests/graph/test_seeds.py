"""Where backward begins: autograd's ones, and gradients that the program gives."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mpcompile.graph import nodes
from mpcompile.graph.seeds import find_seeds, program_scales
from tests.checking import Traced, parameter, trace_graphs


def traced(case: str) -> Traced:
    """Return the graph of a step that differentiates as ``case`` says."""
    weight = parameter(4, 3)

    def step(x: Tensor) -> Tensor:
        result = F.gelu(x @ weight)
        if case == "loss":
            result.mean().backward()
        elif case == "given":
            result.backward(result.detach() * 0.5)
        elif case == "scaled":
            (result.mean() * 1000.0 / 0.5).backward()
        elif case == "shrunk":
            (result.mean() / 4).backward()
        elif case == "added":
            (result.mean() * 8 + result.sum() * 32).backward()
        elif case == "both":
            result.mean().backward(retain_graph=True)
            result.backward(result.detach() * 0.5)
        else:
            (inner,) = torch.autograd.grad(
                result, weight, torch.ones_like(result), create_graph=True
            )
            (inner.square().sum() + result.mean()).backward()
        assert weight.grad is not None
        return cast(Tensor, weight.grad.norm())

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        (found,) = trace_graphs(step, torch.randn(5, 4))
    return found


def names(case: str, is_differentiated: bool = False) -> list[str]:
    return [nodes.op_name(seed) for seed in find_seeds(traced(case).graph, is_differentiated)]


def test_loss_begins_with_ones() -> None:
    assert names("loss") == ["aten.ones_like"]


def test_gradient_of_the_program_is_known_by_its_mark() -> None:
    assert names("given") == ["aten.view"]
    assert names("both") == ["aten.ones_like", "aten.view"]


def test_backward_that_is_differentiated_again_is_left_out() -> None:
    assert names("nested") == ["aten.ones_like"]
    assert names("loss", is_differentiated=True) == ["aten.ones_like"]


def test_constants_behind_a_seed_are_the_scale_of_the_program() -> None:
    """As a power of two; where a gradient spreads to several terms, it is none."""
    cases = ("loss", "scaled", "shrunk", "added", "given")
    found = [program_scales(find_seeds(traced(case).graph, False)) for case in cases]
    assert found == [[1.0], [1024.0], [1.0], [1.0], [1.0]]
