"""Tensors of one row in one order: kernels run over elements as they lie in memory.

That needs the parameter dense and everything else laid out like it. What is not goes through a
dense copy: in before the launch, out after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` fill one range of memory, each once, in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


def same_order(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether elements at equal offsets have equal indices; both have one shape, ``like`` dense."""
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return tensor.numel() == 0 or all(a == b for size, a, b in pairs if size != 1)


@dataclass
class Staging:
    """The copies of one table. ``inward`` and ``outward`` hold (tensor, copy)."""

    inward: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    outward: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    grads: dict[int, torch.Tensor] = field(default_factory=dict)

    def row_layout(self, param: torch.Tensor) -> torch.Tensor:
        """Return ``param``, or a dense tensor whose order stands for it."""
        if is_dense(param):
            return param
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)

    def placed(self, tensor: torch.Tensor, like: torch.Tensor, written: bool) -> torch.Tensor:
        """Return ``tensor`` if it lies as ``like`` does, else its copy that does."""
        if same_order(tensor, like):
            return tensor
        copy = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        self.inward.append((tensor, copy))
        if written:
            self.outward.append((tensor, copy))
        return copy

    def copy_in(self) -> None:
        """Fill the copies."""
        for tensor, copy in self.inward:
            copy.copy_(tensor)

    def copy_out(self) -> None:
        """Write the copies back."""
        for tensor, copy in self.outward:
            tensor.copy_(copy)
