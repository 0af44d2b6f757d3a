"""Tag what a traced ``autograd.grad`` computes: that it is backward, and of which forward node.

AOTAutograd hooks every autograd function of a joint graph, so that backward nodes carry the number
of the function whose gradient they compute. In a flat graph it does not; so the call is wrapped in
one that sets the same hooks. Private torch API, seen in 2.11 to 2.14:
``_aot_autograd.logging_utils.setup_stacktrace_preservation_hooks``. torch 2.11 does not tag nodes
as backward either: there an annotation does, which comes out as ``meta["custom"]``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, traceback
from torch.utils._pytree import tree_leaves

from mpcompile.graph.nodes import BACKWARD_MARK

_TORCH_TAGS = hasattr(traceback, "_mark_autograd_backward")


def tag_backward(gm: GraphModule) -> None:
    """Have each ``torch.autograd.grad`` in Dynamo's graph ``gm`` tag the nodes that it makes."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        node.target = _tagged_grad
    gm.recompile()


def _tagged_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    setup_stacktrace_preservation_hooks(roots)
    with _annotated():
        return torch.autograd.grad(outputs, *args, **kwargs)


def _annotated() -> AbstractContextManager[Any]:
    return nullcontext() if _TORCH_TAGS else traceback.annotate({BACKWARD_MARK: True})
