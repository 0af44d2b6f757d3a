"""Mark what a traced ``autograd.grad`` computes, where torch does not.

Since torch 2.12 or so (2.11 not, 2.13 yes) nodes that autograd makes while a flat graph is traced
carry ``autograd_backward``. For older versions the call is wrapped in an annotation, which comes
out as ``meta["custom"]``. Private torch API: ``torch.fx.traceback._mark_autograd_backward`` as the
sign of a version that tags; goes with support for 2.11.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, traceback

from mpcompile.graph.nodes import BACKWARD_MARK

_TORCH_TAGS = hasattr(traceback, "_mark_autograd_backward")


def mark_backward(gm: GraphModule) -> None:
    """Have each ``torch.autograd.grad`` in Dynamo's graph ``gm`` tag the nodes that it makes."""
    if _TORCH_TAGS:
        return
    for node in gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        node.target = _marked_grad
    gm.recompile()


def _marked_grad(*args: Any, **kwargs: Any) -> Any:
    with traceback.annotate({BACKWARD_MARK: True}):
        return torch.autograd.grad(*args, **kwargs)
