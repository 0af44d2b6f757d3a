"""CTC loss: spelled out, because a size in the middle of the composite op depends on data.

On the CPU only; other devices may choose another kernel. The fake kernels that the parts lack
refuse, as torch does without them, where the loss was not spelled out.

Private torch API, seen in 2.11 to 2.14: ``aten::_ctc_loss.Tensor``, which is what
``torch.ctc_loss`` calls (ATen, ``LossCTC.cpp``), and its backward; ``DynamicOutputShapeException``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from mpcompile.capture.dynamo_handlers import handle
from mpcompile.runtime.stand_ins import is_traced_whole

_MEAN, _SUM = 1, 2  # at::Reduction
_LIBRARY = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Trace the parts of the loss in steps that are traced whole."""
    torch.library.register_fake("aten::_ctc_loss.Tensor", _fake_loss, lib=_LIBRARY)
    torch.library.register_fake("aten::_ctc_loss_backward.Tensor", _fake_backward, lib=_LIBRARY)
    for function in (F.ctc_loss, torch.ctc_loss):
        handle(function, _trace)


def _is_spelled_out(log_probs: Tensor) -> bool:
    return is_traced_whole() and log_probs.device.type == "cpu"


def _trace(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the traced loss, or None: Dynamo goes on as if it had not asked."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    log_probs = args[0] if args else kwargs["log_probs"]
    if not _is_spelled_out(log_probs.as_proxy().node.meta["example_value"]):
        return None
    function: Any = _ctc_loss
    return UserFunctionVariable(function).call_function(tx, list(args), kwargs)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    inputs, lengths = _as_tensor(input_lengths), _as_tensor(target_lengths)
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    loss: Tensor
    loss, _ = torch.ops.aten._ctc_loss.Tensor(
        batch, targets.long(), inputs, lengths, blank, zero_infinity
    )
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros((), dtype=loss.dtype), loss)
    kind = reduction if isinstance(reduction, int) else _reduction.get_enum(reduction)
    if kind == _MEAN:
        return (loss / lengths.to(loss.dtype).clamp_min(1)).mean()
    if kind == _SUM:
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


def _as_tensor(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)


def _fake_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    if not _is_spelled_out(log_probs):
        raise DynamicOutputShapeException(torch.ops.aten._ctc_loss.Tensor)
    length, rows, _ = log_probs.shape
    states = torch.library.get_ctx().new_dynamic_size()  # 2 * longest target + 1
    return log_probs.new_empty(rows), log_probs.new_empty(rows, length, states)


def _fake_backward(grad: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
