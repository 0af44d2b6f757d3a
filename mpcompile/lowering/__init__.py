"""Turn a Dynamo graph into something that runs: through Inductor, or op by op.

Both lowerings trace with the same decompositions, none, so that passes meet softmax, norms and
losses whole and decide about each as one op, and so that eager lowering runs the kernels that
eager PyTorch runs. Inductor's own decompositions follow behind the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from mpcompile.config import Config
from mpcompile.lowering import eager, inductor
from mpcompile.lowering.rewriter import Compiled, Rewriter

__all__ = ["Compiled", "Rewriter", "is_cached", "lower", "lower_stock"]

lower_stock = inductor.lower_stock


def lower(gm: GraphModule, inputs: Sequence[Any], config: Config, rewriter: Rewriter) -> Compiled:
    """Compile Dynamo's graph ``gm`` as ``config.lowering`` and ``config.mode`` say."""
    if config.lowering == "eager":
        return eager.lower(gm, inputs, rewriter)
    return inductor.lower(gm, inputs, config.mode, rewriter)


def is_cached(config: Config) -> bool:
    """Whether graphs that are lowered as ``config.lowering`` says are kept for other processes."""
    return config.lowering == "inductor" and inductor.has_cache()
