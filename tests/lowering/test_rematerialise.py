"""What the backward of a whole step computes again, and what forward keeps for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from mpcompile.backend import last_report
from mpcompile.graph import nodes
from mpcompile.lowering import eager
from mpcompile.lowering.rematerialise import rematerialise
from tests.steps import TinyGPT, compile_step

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


def gpt_step(num_backward: int = 1) -> Any:
    """Return a whole step of a GPT with ``num_backward`` micro-batches."""
    torch.manual_seed(0)
    model = TinyGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> Tensor:
        loss = torch.zeros(())
        for part in tokens.chunk(num_backward):
            logits = model(part[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, part[:, 1:].flatten())
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def count(gm: GraphModule) -> int:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return sum(nodes.op_name(node) in PRODUCTS for node in calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_backward", [1, 2])
def test_cheap_values_are_computed_again_and_products_are_not(
    monkeypatch: pytest.MonkeyPatch, dtype: str, num_backward: int
) -> None:
    seen: list[tuple[int, int, int]] = []

    def watched(gm: GraphModule) -> int:
        before = count(gm)
        again = rematerialise(gm)
        seen.append((before, count(gm), again))
        return again

    monkeypatch.setattr(eager, "rematerialise", watched)
    compile_step(gpt_step(num_backward), dtype=dtype)(torch.randint(64, (4, 33)))
    ((before, after, again),) = seen
    assert before == after > 0
    assert again > 0


def test_whole_step_keeps_no_more_than_the_partitioned_one() -> None:
    saved = {}
    for capture in ("whole", "regions"):
        compiled = compile_step(gpt_step(), capture=capture)
        compiled(torch.randint(64, (4, 33)))
        saved[capture] = sum(
            sum(region.saved_bytes.values()) for region in last_report(compiled).regions
        )
    assert 0 < saved["whole"] <= 1.02 * saved["regions"]
