"""``nn.Transformer`` compares a mask with a causal one to choose a kernel: not while tracing.

The answer is a hint; the mask is applied in either case.

Private torch API, seen in 2.11 to 2.14: ``torch.nn.modules.transformer._detect_is_causal_mask``.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules import transformer

from mpcompile.capture.dynamo_handlers import trace_instead


def install() -> None:
    """Answer with the caller's hint in steps that are traced whole."""
    trace_instead(transformer._detect_is_causal_mask, _hint)


def _hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
