"""What a whole step holds in memory, against eager and against the partitioned path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from examples.train_gpt import measure_peak_bytes
from mpcompile.backend import last_report
from mpcompile.inspection.memory import MemoryPeak
from tests.steps import TinyGPT, compile_step, training_region

TOKENS = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))


class CheckpointedGPT(TinyGPT):
    """Keeps the inputs of its blocks only, if asked to."""

    def __init__(self, checkpointed: bool, layers: int) -> None:
        super().__init__(layers=layers)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        def run(block: Any, x: Tensor) -> Tensor:
            x = x + block["attention"](block["norm"](x))
            out: Tensor = x + block["mlp"](x)
            return out

        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(run, block, x, use_reentrant=False)
            else:
                x = run(block, x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt_step(checkpointed: bool, layers: int = 3) -> Any:
    torch.manual_seed(0)
    model = CheckpointedGPT(checkpointed, layers)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor, _: Tensor | None = None) -> Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def allocated(step: Any) -> int:
    """Return what a step allocates at its peak, once it has warmed up."""
    for _ in range(2):
        step(TOKENS)
    return measure_peak_bytes(step, TOKENS, TOKENS)[1]


def peak_of(compiled: Any) -> MemoryPeak:
    peak = training_region(compiled).peak
    assert peak is not None
    return peak


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_checkpointed_whole_step_allocates_no_more_than_eager() -> None:
    eager = allocated(gpt_step(True))
    ours = allocated(compile_step(gpt_step(True), dtype="float32", check="off"))
    plain = allocated(compile_step(gpt_step(False), dtype="float32", check="off"))
    assert ours <= 1.01 * eager
    assert ours < 0.7 * plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_whole_step_holds_no_more_than_the_partitioned_one(dtype: str, checkpointed: bool) -> None:
    peaks, saved = {}, {}
    for capture in ("whole", "regions"):
        compiled = compile_step(gpt_step(checkpointed), dtype=dtype, capture=capture, check="off")
        compiled(TOKENS)
        peaks[capture] = peak_of(compiled)
        saved[capture] = sum(training_region(compiled).saved_bytes.values())
    assert 0 < peaks["whole"].total() <= 1.01 * peaks["regions"].total()
    assert 0 < saved["whole"] <= 1.02 * saved["regions"]


def test_checkpointed_layers_add_their_inputs_only() -> None:
    kept = []
    for layers in (2, 4):
        compiled = compile_step(gpt_step(True, layers), dtype="float32", check="off")
        compiled(TOKENS)
        kept.append(sum(training_region(compiled).saved_bytes.values()))
    input_of_a_block = 8 * 64 * 64 * 4
    assert kept[1] - kept[0] == 2 * input_of_a_block


def test_report_shows_the_peak_by_role() -> None:
    compiled = compile_step(gpt_step(False))
    compiled(TOKENS)
    text = str(last_report(compiled))
    assert "Memory at the peak of each graph" in text
    assert "16-bit copies" in text
