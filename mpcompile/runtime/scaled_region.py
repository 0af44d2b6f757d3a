"""One graph's part in the loss scale of its step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpcompile.runtime.scale_state import real_tensors
from mpcompile.runtime.unread_gradients import Owners, leaves_of

if TYPE_CHECKING:
    from mpcompile.runtime.loss_scale import LossScale


@dataclass
class ScaledRegion:
    """What one graph has to do with the scale; the pass and the rewriter fill it in.

    Attributes:
        scale: whose graph it is.
        source: its number among the sources of names.
        fed: positions of the inputs that its backward gives gradients to.
        buffers: positions of the buffers, and of other state, that its forward writes to.
        params: ids of the tensors at ``fed`` in the last forward.
        owners: leaves that the last forward read.
        flag: whether its backward overflowed since the last step; of an update, whether it is
            skipped. It stays where it is, as CUDA graphs write to it.
        updates: whether the graph is an update.
        folded: names of the updates that get scaled gradients from here, and unscale them.
        input_names: what the user calls each input, until it was told.
        own_scale: by how much the program scales its loss itself, if all backward is in the graph.
    """

    scale: LossScale
    source: int
    fed: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    params: frozenset[int] = frozenset()
    owners: Owners = ()
    flag: Tensor | None = None
    updates: bool = False
    folded: frozenset[str] = frozenset()
    input_names: Sequence[str] = ()
    own_scale: float | None = None

    def prepare(self, device: torch.device, names: Iterable[str]) -> None:
        """Make room on ``device`` for what the graph notes of gradients with these names."""
        with real_tensors():
            self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.scale.state(device)
        self.scale.names[self.source] = tuple(names)

    def before(self, inputs: Sequence[Any]) -> None:
        """Note who gets the gradients, and keep what the buffers hold."""
        if self.input_names:
            self.scale.name_parameters(zip(inputs, self.input_names, strict=False))
            self.input_names = ()
        self.params = frozenset(id(inputs[i]) for i in self.fed)
        if self.flag is not None and not self.updates:
            self.owners = [weakref.ref(leaf) for leaf in leaves_of(inputs)]
            self.scale.end_unread(() if self.fed else self._replaced(inputs))
        if self.buffers:
            served = self.params or frozenset(map(id, leaves_of(inputs))) or None
            self.scale.buffers.keep([inputs[i] for i in self.buffers], served)

    def _replaced(self, inputs: Sequence[Any]) -> set[int]:
        """Return the gradients that a graph with a backward replaces: it adds to what it reads."""
        grads = {id(param.grad) for ref in self.owners if (param := ref()) is not None}
        return grads - set(map(id, inputs))

    def after(self) -> None:
        """Note that an update ran."""
        if self.updates and self.flag is not None:
            self.scale.end_update(self.flag, None)

    def feeds(self, params: frozenset[int] | None) -> bool:
        """Whether any of ``params`` gets gradients here; a graph without backward goes with all."""
        return params is None or not self.fed or not params.isdisjoint(self.params)
