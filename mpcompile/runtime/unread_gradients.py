"""Gradients that graphs have made and no update has read: are they still to be read?

A program may leave out its update by itself, ``if torch.isfinite(norm): opt.step()`` say. That ends
a step all the same, or the loss scale would never hear of the overflow and every step to come would
be left out. If the program accumulates instead, the gradients are still there. No value is looked
at, only whether ``.grad`` is None, or is replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Owners = Sequence[weakref.ref[Tensor]]


def leaves_of(inputs: Sequence[Any]) -> list[Tensor]:
    """Return the leaves among the inputs of a graph that its gradients may go to."""
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    return [item for item in tensors if item.requires_grad and item.is_leaf]


@dataclass(frozen=True)
class _Made:
    """Gradients of one graph: when they were made, and whose they are."""

    call: int
    owners: Owners

    def are_gone(self, replaced: Collection[int]) -> bool:
        """Whether none of the gradients is there; ``replaced`` are ids of those about to go."""
        params = [param for ref in self.owners if (param := ref()) is not None]
        grads = [param.grad for param in params]
        return bool(params) and all(grad is None or id(grad) in replaced for grad in grads)


class UnreadGradients:
    """What graphs of a step have made since the last update."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def add(self, source: int, call: int, owners: Owners) -> None:
        """Note that the graph with the number ``source`` makes gradients in call ``call``."""
        self._made[source] = _Made(call, owners)

    def forget(self) -> None:
        """Note that they were read, or are not to be."""
        self._made.clear()

    def are_gone(self, before: int, replaced: Collection[int] = ()) -> bool:
        """Whether there are some, all from calls ``before`` this one, and none will be read."""
        made = self._made.values()
        return bool(made) and all(m.call < before and m.are_gone(replaced) for m in made)
