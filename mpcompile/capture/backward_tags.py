"""Tag what a traced ``autograd.grad`` computes: that it is backward, and of which forward node.

AOTAutograd hooks every autograd function of a joint graph, so that backward nodes carry the number
of the function whose gradient they compute. In a flat graph it does not; so the call is wrapped in
one that sets the same hooks. Private torch API, seen in 2.11 to 2.14:
``_aot_autograd.logging_utils.setup_stacktrace_preservation_hooks``, and ``get_proxy_mode`` and
``get_proxy_slot`` of ``torch.fx.experimental.proxy_tensor``. torch 2.11 does not tag nodes
as backward either: there an annotation does, which comes out as ``meta["custom"]``, as do the marks
of what a backward begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule, Node, traceback
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mpcompile.capture.graph_inputs import user_name
from mpcompile.graph.gradients import GRADIENT_OF
from mpcompile.graph.nodes import BACKWARD_MARK
from mpcompile.graph.seeds import CREATES_GRAPH_MARK, SEED_MARK

_TORCH_TAGS = hasattr(traceback, "_mark_autograd_backward")


def tag_backward(gm: GraphModule) -> None:
    """Have each ``torch.autograd.grad`` in Dynamo's graph ``gm`` tag the nodes that it makes."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        node.target = _tagged_grad
        inputs = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:2]
        names = [user_name(item) for item in inputs if isinstance(item, Node)]
        node.kwargs = {**node.kwargs, "names": names}
    gm.recompile()


def _tagged_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    names: Sequence[str] = (),
    **kwargs: Any,
) -> Any:
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    setup_stacktrace_preservation_hooks(roots)
    marks = {} if _TORCH_TAGS else {BACKWARD_MARK: True}
    marks |= {CREATES_GRAPH_MARK: True} if create_graph else {}
    with _annotated({SEED_MARK: True, **marks}):
        given = tree_map_only(Tensor, _seed, grad_outputs)
    with _annotated(marks):
        found = torch.autograd.grad(outputs, inputs, given, retain_graph, create_graph, **kwargs)
    for grad, name in zip(found, names, strict=False):
        _note_name(grad, name)
    return found


FUNCTIONS = (f"{_tagged_grad.__module__}.{_tagged_grad.__qualname__}",)
"""What this module puts into Dynamo's graphs."""


def _note_name(grad: Tensor | None, name: str) -> None:
    """Note on the node that computes ``grad`` whose gradient it is, for messages."""
    mode = proxy_tensor.get_proxy_mode()
    if grad is None or mode is None:
        return
    if isinstance(grad, FunctionalTensor):
        grad = torch._from_functional_tensor(grad.elem)
    slot: Any = proxy_tensor.get_proxy_slot(grad, mode.tracer, None)
    if slot is not None:
        slot.proxy.node.meta[GRADIENT_OF] = name


def _seed(grad: Tensor) -> Tensor:
    """Return a view of ``grad``: a node that can be marked without marking what made it."""
    return grad.view_as(grad) if grad.layout is torch.strided else grad


def _annotated(marks: Mapping[str, bool]) -> AbstractContextManager[Any]:
    return traceback.annotate(dict(marks)) if marks else nullcontext()
