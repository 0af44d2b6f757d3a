"""The user's own precision choices: by op, by module, by source line, by node.

The most specific entry wins: node, then line, then module, then op. Backward nodes are found
through their forward node, whose module and line they carry.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from mpcompile.graph import nodes
from mpcompile.precision import Precision


class Specificity(enum.IntEnum):
    """How narrow an entry is; the higher one wins."""

    OP = 1
    MODULE = 2
    LINE = 3
    NODE = 4


@dataclass(frozen=True)
class Override:
    """One entry of ``keep_fp32`` or ``keep_half``."""

    pattern: str
    precision: Precision

    def match(self, node: Node, forward: Node) -> Specificity | None:
        """Return how narrowly this entry names ``node``, whose forward node is ``forward``."""
        if self.pattern.removeprefix("%") == node.name:
            return Specificity.NODE
        if ":" in self.pattern:
            named = self.pattern.rsplit("/", 1)[-1]
            return Specificity.LINE if nodes.user_line(forward) == named else None
        if self.pattern.startswith(("aten.", "prims.", "mpcompile.")):
            return Specificity.OP if self._names_op(node) or self._names_op(forward) else None
        path = nodes.module_path(forward)
        inside = fnmatch.fnmatchcase(path, self.pattern) or path.startswith(f"{self.pattern}.")
        return Specificity.MODULE if path and inside else None

    def _names_op(self, node: Node) -> bool:
        return self.pattern in (nodes.op_name(node), str(node.target))


def build_overrides(keep_fp32: Sequence[str], keep_half: Sequence[str]) -> tuple[Override, ...]:
    """Turn the two options into entries."""
    return tuple(
        Override(pattern, precision)
        for patterns, precision in ((keep_fp32, Precision.FP32), (keep_half, Precision.HALF))
        for pattern in patterns
    )


def find_override(overrides: Sequence[Override], node: Node, forward: Node) -> Override | None:
    """Return the most specific entry that names ``node``; of equals the first."""
    best: Override | None = None
    narrowest = 0
    for entry in overrides:
        found = entry.match(node, forward)
        if found is not None and found > narrowest:
            best, narrowest = entry, found
    return best
