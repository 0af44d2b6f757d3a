"""What capture does for the loss scale: watch calls of graphs, say what they and closures write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput

from mpcompile.capture.reach import reach
from mpcompile.distributed.plan import SumOnWire
from mpcompile.graph.roles import GraphKind, InputRole, Roles
from mpcompile.lowering import Compiled
from mpcompile.runtime.dispatch import Guard
from mpcompile.runtime.loss_scale import LossScale
from mpcompile.runtime.scaled_region import ScaledRegion
from mpcompile.runtime.updates import Updates

_GRADIENTS = (InputRole.GRADIENT, InputRole.TANGENT)


@dataclass
class UpdateReads:
    """Gradients that updates alone read from the outputs of one segment.

    Attributes:
        outputs: by name of an update, the positions of all gradients that it reads.
        scaled: names of the updates whose gradients the segment leaves scaled.
        on_wire: which gradients, in the order of the update, it gets as they are on the wire.
    """

    outputs: Mapping[str, Sequence[int]]
    scaled: set[str] = field(default_factory=set)
    on_wire: dict[str, tuple[SumOnWire | None, ...]] = field(default_factory=dict)


def scaled_call(compiled: Compiled, region: ScaledRegion) -> Compiled:
    """Return ``compiled`` with what the loss scale needs to know of each call around it."""

    def call(*inputs: Any) -> Any:
        region.before(inputs)
        outputs = compiled(*inputs)
        region.after()
        return outputs

    disabled: Compiled = torch.compiler.disable(call)
    return disabled


def written_state(roles: Roles) -> tuple[int, ...]:
    """Return the positions of what a forward writes to, beside gradients.

    That is buffers, and whatever else the step finds and changes: a queue, an average of losses.
    """
    if roles.kind is GraphKind.UPDATE:
        return ()
    state = [node for node in roles.mutated if roles.inputs.get(node) not in _GRADIENTS]
    descs = [node.meta.get("desc") for node in state]
    return tuple(sorted(desc.idx for desc in descs if isinstance(desc, PlainAOTInput)))


def step_guard(scale: LossScale, updates: Updates) -> Guard:
    """Return what guards a step that runs as it is: it goes back as a whole if it overflows.

    Its closure may run in Python, so the buffers of all modules that this can reach are kept.
    """

    def guard(optimizer: torch.optim.Optimizer, given: Sequence[Any]) -> Callable[[], None]:
        modules = [item for item in reach(*given) if isinstance(item, torch.nn.Module)]
        scale.keep_buffers(optimizer, [b for m in modules for b in m.buffers(recurse=False)])
        return updates.guard(optimizer)

    return guard
