"""Marks that outlive decomposition: what Dynamo's graph says about precision, read again in ATen.

``x.float()`` on an fp32 tensor, an ``autocast(enabled=False)`` region and the name of a loss are
visible in Dynamo's graph and gone in ATen. The ``custom`` metadata of a node is copied to every
node that is traced from it, and by AOTAutograd to their backward nodes, so the mark goes there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch.fx import Node

_KEY = "mpcompile"


class PinScope(enum.Enum):
    """What a pin covers of the nodes that are traced from the marked one."""

    READER = "reader"  # all but matrix products: those need every operand pinned
    OPERANDS = "operands"  # a matrix product with every operand pinned
    ALL = "all"
    COMPOSITE = "composite"  # a whole op of Dynamo's graph that the table knows by name
    OWN_CAST = "own-cast"  # a cast that cast-composites put there: free to be dropped
    PARTS = "parts"  # an op that was given 16-bit inputs, and is perhaps traced as its parts


@dataclass(frozen=True)
class Pin:
    """A mark on a node.

    Attributes:
        scope: what it covers.
        why: for people; for ``COMPOSITE`` the name that the table knows.
    """

    scope: PinScope
    why: str


def set_pin(node: Node, pin: Pin) -> None:
    """Mark ``node``; the first mark of a wider scope stays."""
    old = pin_of(node)
    if old is not None and old.scope is PinScope.ALL:
        return
    custom = dict(node.meta.get("custom") or {})
    custom[_KEY] = (pin.scope.value, pin.why)
    node.meta["custom"] = custom


def pin_of(node: Node) -> Pin | None:
    """Return the mark of ``node``, or None."""
    custom = node.meta.get("custom")
    if not isinstance(custom, dict) or _KEY not in custom:
        return None
    scope, why = custom[_KEY]
    return Pin(PinScope(scope), why)
