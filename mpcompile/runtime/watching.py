"""What a traced step calls: shapes it reads, numbers it makes into tensors, lists it works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from mpcompile.errors import CodegenError
from mpcompile.runtime.symbols import SYMBOLS


def _is_own(value: object) -> bool:
    """Whether ``value`` is a real tensor, which a trace would change, and no constant number."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return not torch._is_functional_tensor(value) and (value.requires_grad or value.dim() > 0)


class WatchMode(TorchFunctionMode):
    """Notes whether the step reads shapes, and keeps numbers made into tensors symbolic."""

    SHAPE_READS = frozenset(
        {
            torch.Tensor.shape.__get__,  # type: ignore[attr-defined]  # a property of the class
            torch.Tensor.size,
            torch.Tensor.numel,
            torch.Tensor.nelement,
            torch.Tensor.__len__,
            torch.Tensor.stride,
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.reads_shape = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        if any(map(_is_own, torch.utils._pytree.tree_leaves((args, kwargs)))):
            raise CodegenError(
                "fuse-updates: the step works on tensors that are neither in its groups nor in its "
                "state, such as references of its own."
            )
        self.reads_shape |= func in self.SHAPE_READS
        if getattr(func, "__name__", "").startswith("_foreach_") and not kwargs.get("out"):
            return _one_by_one(func, args, kwargs)
        if func in (torch.as_tensor, torch.tensor) and isinstance(args[0], SYMBOLS):
            dtype = torch.get_default_dtype() if isinstance(args[0], torch.SymFloat) else None
            fill: Any = args[0]
            return torch.full((), fill, dtype=kwargs.get("dtype") or dtype)
        if func is torch.Tensor.square_:  # functionalize has no rule for it (2.11 to 2.14)
            return args[0].copy_(args[0] * args[0])
        return func(*args, **kwargs)


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a ``torch._foreach_`` function as the operation on each tensor that it stands for."""
    name = func.__name__.removeprefix("_foreach_")
    one = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, name, None)
    if one is None or not isinstance(args[0], (list, tuple)):
        return func(*args, **kwargs)
    results = []
    for position in range(len(args[0])):
        mine = [arg[position] if isinstance(arg, (list, tuple)) else arg for arg in args]
        if name.startswith("addc") and len(mine) > 3:
            results.append(one(*mine[:3], value=mine[3], **kwargs))
        else:
            results.append(one(*mine, **kwargs))
    return results
