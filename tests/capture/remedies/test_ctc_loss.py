from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.capture.remedies import ctc_loss
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with

FRAMES = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[1, 2, 3, 0], [4, 4, 0, 0], [1, 2, 4, 3]])
LENGTHS = torch.tensor([3, 2, 4])


def speech_program(**options: Any) -> Program:
    model = nn.Linear(4, 5)

    def loss_of(frames: Tensor, targets: Tensor, lengths: Any) -> Any:
        num_frames = torch.full((frames.shape[1],), frames.shape[0])
        log_probs = model(frames).log_softmax(-1)
        return F.ctc_loss(log_probs, targets, num_frames, lengths, **options).sum()

    return train_with(loss_of, model)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss_is_in_the_graph(reduction: str, zero_infinity: bool) -> None:
    def build() -> Program:
        return speech_program(reduction=reduction, zero_infinity=zero_infinity)

    check_whole(build, FRAMES, TARGETS, LENGTHS)


def test_impossible_alignment_has_no_gradient_with_zero_infinity() -> None:
    def build() -> Program:
        return speech_program(zero_infinity=True)

    check_whole(build, FRAMES[:3], TARGETS, torch.tensor([3, 2, 4]))


def test_targets_in_one_row_are_in_the_graph() -> None:
    check_whole(speech_program, FRAMES, torch.tensor([1, 2, 3, 4, 4, 1, 2, 4, 3]), LENGTHS)


def test_lengths_that_are_numbers_are_in_the_graph() -> None:
    def build() -> Program:
        model = nn.CTCLoss()
        linear = nn.Linear(4, 5)

        def loss_of(frames: Tensor, targets: Tensor) -> Any:
            return model(linear(frames).log_softmax(-1), targets, (9, 9, 9), (3, 2, 4))

        return train_with(loss_of, linear)

    check_whole(build, FRAMES, TARGETS)


def test_one_sequence_without_a_batch_is_in_the_graph() -> None:
    def build() -> Program:
        model = nn.Linear(4, 5)

        def loss_of(frames: Tensor, targets: Tensor) -> Any:
            lengths = torch.tensor(9), torch.tensor(3)
            return F.ctc_loss(model(frames).log_softmax(-1), targets, *lengths)

        return train_with(loss_of, model)

    check_whole(build, FRAMES[:, 0], TARGETS[0, :3])


def test_longest_target_may_change_from_call_to_call() -> None:
    model, step = speech_program()
    copy, plain = speech_program()
    copy.load_state_dict(model.state_dict())
    compiled = torch.compile(
        plain, backend="mpcompile", options={"dtype": "float32", "lowering": "eager"}
    )
    for lengths in (LENGTHS, torch.tensor([1, 1, 1]), torch.tensor([2, 2, 3])):
        assert torch.equal(compiled(FRAMES, TARGETS, lengths), step(FRAMES, TARGETS, lengths))


def test_ctc_loss_breaks_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_loss, "is_traced_whole", lambda: False)
    check_breaks(speech_program, FRAMES, TARGETS, LENGTHS, reason="Dynamic shape operator")


def test_wrong_reduction_raises_as_in_eager() -> None:
    _, step = speech_program(reduction="average")
    compiled = torch.compile(step, backend="mpcompile", options={"lowering": "eager"})
    with pytest.raises(Exception, match="average is not a valid value for reduction"):
        compiled(FRAMES, TARGETS, LENGTHS)
