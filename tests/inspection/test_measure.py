"""The numbers of a report against counts by hand, and against autocast's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch.fx import GraphModule

from mpcompile.inspection.measure import OpTotals, measure_casts, measure_ops, measure_saved
from tests.graph.trace import trace
from tests.steps import TinyGPT, compile_step, training_region


def totals(function: Callable[..., Any], *inputs: Any) -> OpTotals:
    return measure_ops(trace(function, *inputs).graph)


def test_matrix_product_has_two_flops_a_multiply() -> None:
    found = totals(torch.mm, torch.ones(2, 3), torch.ones(3, 5))
    assert found == OpTotals(ops={"f32": 1}, matmul_flops={"f32": 2 * 2 * 3 * 5})


def test_batched_product_and_convolution_are_counted() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, weight), torch.bmm(x[0], x[0])

    found = totals(function, torch.ones(1, 2, 6, 6), torch.ones(4, 2, 3, 3))
    convolution, product = 2 * 4 * 4 * 4 * 2 * 3 * 3, 2 * 2 * 6 * 6 * 6
    assert found.matmul_flops == {"f32": convolution + product}


def test_flops_go_by_the_widest_operand_and_ops_by_their_result() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half = x.to(torch.bfloat16)
        return torch.addmm(torch.zeros(2), x, y), half @ half, x > 0

    found = totals(function, torch.ones(2, 2), torch.ones(2, 2))
    assert found.matmul_flops == {"f32": 16, "bf16": 16}
    assert found.ops == {"bf16": 2, "f32": 2, "b8": 1}
    assert found.half_share() == 0.5


def test_share_of_no_flops_is_none() -> None:
    assert totals(torch.relu, torch.ones(2)).half_share() is None


def test_attention_is_counted_forward_and_backward() -> None:
    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    rows, heads, length, width = 2, 3, 8, 4
    found = totals(function, torch.ones(rows, heads, length, width))
    assert found.matmul_flops == {"f32": 2 * (2 * rows * heads * length * length * width)}


def test_casts_name_source_reader_and_dtypes() -> None:
    graph = trace(lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16), torch.ones(2, 2)).graph
    casts, decisions = measure_casts(graph)
    assert [(c.source, c.dtypes, c.shape, c.reader) for c in casts] == [
        ("x_1", "f32 -> bf16", "[2,2]", "mm")
    ] * 2
    assert {c.reason for c in casts} == {"as written"}
    assert decisions == []


def test_saved_bytes_are_those_that_backward_reads() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    saved = {}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        compiled = compile_step(step, dtype=dtype)
        compiled(torch.ones(10, 16))
        saved[size] = training_region(compiled).saved_bytes
    # The hidden activation; x and the second weight are the user's own. In 16 bits their casts are
    # kept beside it (or, of x, made again).
    assert saved[4] == {"f32": 4 * 10 * 32}
    assert set(saved[2]) == {"bf16"}
    assert 2 * 10 * 32 <= saved[2]["bf16"] <= 2 * (10 * 32 + 10 * 16 + 32 * 8)


# --- against the peer ----------------------------------------------------------------------------


def gpt_step() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    model = TinyGPT()

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss_of, torch.randint(64, (4, 33))


def saved_by_autocast(loss_of: Callable[[Tensor], Tensor], tokens: Tensor) -> dict[str, int]:
    """Compile under autocast with nothing of ours and measure its backward graph."""
    measured: list[dict[str, int]] = []

    def run(graph: GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: GraphModule, _: Sequence[Any]) -> Any:
        measured.append(measure_saved(graph.graph))
        return make_boxed_func(graph.forward)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=run,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
            decompositions={},
        )

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(tokens)

    torch.compile(step, backend=backend)(tokens).backward()
    (saved,) = measured
    return saved


def test_gpt_saves_no_more_than_under_autocast() -> None:
    loss_of, tokens = gpt_step()
    compiled = compile_step(loss_of)
    compiled(tokens).backward()
    ours = sum(training_region(compiled).saved_bytes.values())
    torch._dynamo.reset()
    peers = sum(saved_by_autocast(loss_of, tokens).values())
    assert peers > 0
    assert ours <= 1.1 * peers


def test_matmuls_of_gpt_run_on_16_bit_operands() -> None:
    loss_of, tokens = gpt_step()
    compiled = compile_step(loss_of)
    compiled(tokens).backward()
    region = training_region(compiled)
    assert (region.ops_after.half_share() or 0) >= 0.95
    assert region.ops_before.matmul_flops.keys() <= {"f32", "bf16"}
    assert sum(region.ops_before.matmul_flops.values()) == pytest.approx(
        sum(region.ops_after.matmul_flops.values())
    )
