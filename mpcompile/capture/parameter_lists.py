"""Notice that an optimizer has other parameters than when a step was traced.

Dynamo sees an update as one op with the gradients of the parameters of that moment; a guard on
every entry of ``param_groups`` would cost more than the step's dispatch.
"""

from __future__ import annotations

import operator
import weakref

import torch
from torch.optim import Optimizer

from mpcompile.runtime.stand_ins import expire_graphs


class ParameterLists:
    """The parameters that graphs of one step rely on, by optimizer."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Optimizer, list[list[torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def keep(self, optimizer: Optimizer) -> None:
        """Rely on the parameters that ``optimizer`` has now."""
        self._known[optimizer] = [list(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Expire all graphs if an optimizer has got others."""
        for optimizer, known in list(self._known.items()):
            if not _holds(optimizer, known):
                self.keep(optimizer)
                expire_graphs()


def _holds(optimizer: Optimizer, known: list[list[torch.Tensor]]) -> bool:
    groups = optimizer.param_groups
    return len(groups) == len(known) and all(
        len(group["params"]) == len(params) and all(map(operator.is_, group["params"], params))
        for group, params in zip(groups, known, strict=True)
    )
