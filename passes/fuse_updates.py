"""Bind the update ops of a graph to kernels that update all parameters of an optimizer at once.

Runs last: a kernel is emitted when every other pass has said what it needs of it. Outside a graph,
``opt.step()`` meets the same runtime through ``mpcompile.runtime.dispatch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from mpcompile.errors import CaptureError, PassError
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.runtime import ops

_UPDATE_OPS = (torch.ops.mpcompile.update.default,)


@dataclass(frozen=True)
class FuseUpdates(GraphPass):
    """Check that each ``mpcompile::update`` has an optimizer behind its handle.

    Requires: a graph of any stage; update ops with literal handles.
    Ensures: the graph is unchanged; the count is that of update ops.
    """

    name: ClassVar[str] = "fuse-updates"
    stage: ClassVar[Stage] = Stage.RUNTIME
    exact: ClassVar[bool] = False
    runs_after: ClassVar[tuple[str, ...]] = ("fold-casts",)
    off: ClassVar[str] = (
        "the optimizer's own step runs as eager; with `capture` regions it is one more region"
    )

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Return how many update ops ``gm`` has.

        Raises:
            PassError: an update op belongs to no optimizer of this process.
        """
        count = 0
        for node in gm.graph.nodes:
            if node.target not in _UPDATE_OPS:
                continue
            try:
                ops.find(str(node.args[0]))
            except CaptureError as error:
                raise PassError(f"{self.name}: {node.format_node()}: {error}") from error
            count += 1
        return count
