from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.capture import dynamo_handlers
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with


def decoding_program() -> Program:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 1)

    def loss_of(x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return decoder(x, x, tgt_mask=mask).square().mean()

    return train_with(loss_of, decoder)


def test_transformer_with_a_causal_mask_is_one_graph() -> None:
    check_whole(decoding_program, torch.randn(2, 5, 8))


def test_transformer_with_another_mask_is_one_graph() -> None:
    def build() -> Program:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        return train_with(lambda x, mask: encoder(x, mask=mask).square().mean(), encoder)

    check_whole(build, torch.randn(2, 5, 8), torch.eye(5) * -1e3)


def test_mask_breaks_the_graph_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_handlers, "is_traced_whole", lambda: False)
    reason = "Could not guard on data-dependent expression"
    check_breaks(decoding_program, torch.randn(2, 5, 8), reason=reason)
