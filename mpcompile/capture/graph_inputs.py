"""What Dynamo knows of a graph's inputs: parameter, buffer, gradient, optimizer state or data.

Dynamo names where each input comes from (``meta["grapharg"].source``); the name follows Python
syntax and ends in the attribute that holds the tensor. Written against torch 2.11 to 2.14.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpcompile.errors import CaptureError
from mpcompile.graph.nodes import HALF_DTYPES
from mpcompile.graph.roles import InputRole

_BUFFER = re.compile(r"\._buffers\['[^']+'\]$")
_NAMES = re.compile(r"(?<=\[')[^']+|(?<=\[)\d+|(?<=\.)\w+")
_STATE = re.compile(r"\.state\[.*\]\['[^']+'\]$|\['state'\]")


def input_roles(gm: GraphModule) -> tuple[InputRole, ...]:
    """Return the role of each input of Dynamo's graph, in order."""
    return tuple(_role(node) for node in gm.graph.find_nodes(op="placeholder"))


def input_names(gm: GraphModule) -> tuple[str, ...]:
    """Return what the user calls each input: ``model.0.weight``, or its name in the graph."""
    return tuple(user_name(node) for node in gm.graph.find_nodes(op="placeholder"))


def user_name(node: Node) -> str:
    """Return what the user calls an input of Dynamo's graph, or its name in the graph."""
    source = source_of(node)
    for part in ("._modules", "._parameters", "._buffers"):
        source = source.replace(part, "")
    return ".".join(_NAMES.findall(source)) or node.name


def source_of(node: Node) -> str:
    """Return where Dynamo found an input, ``G['net'].0.weight`` in Python syntax, or ''."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name: Any = source.name
    return str(name() if callable(name) else name)  # a method until 2.11, a property since


def _role(node: Node) -> InputRole:
    source = source_of(node)
    if source.endswith(".grad"):
        return InputRole.GRADIENT
    if isinstance(node.meta.get("example_value"), Parameter):
        return InputRole.PARAMETER
    if _BUFFER.search(source):
        return InputRole.BUFFER
    return InputRole.STATE if _STATE.search(source) else InputRole.DATA


def refuse_unsupported(gm: GraphModule) -> None:
    """Refuse inputs that would be trained wrongly or not at all as we treat them.

    Raises:
        CaptureError: an input is managed by FSDP, or is a tensor subclass.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        source, val = source_of(node), node.meta.get("example_value")
        if "_fsdp_wrapped_module" in source or "_fsdp_param" in source:
            raise CaptureError(
                f"input {source}: the parameter is managed by FSDP, whose own mixed precision "
                "casts and shards it between our graphs. Use FSDP's MixedPrecision(Policy) with "
                "backend='inductor', or DistributedDataParallel with this backend."
            )
        if isinstance(val, Tensor) and _is_subclass(val):
            raise CaptureError(
                f"input {source}: {type(val).__name__} is a tensor subclass; how its parts may be "
                "cast is not known. Use plain tensors with this backend, or backend='inductor'. "
                "DTensor comes from FSDP2 and tensor parallelism, which are not supported."
            )


def _is_subclass(val: object) -> bool:
    return bool(is_traceable_wrapper_subclass(val))


def warn_half_parameters(gm: GraphModule) -> None:
    """Warn if the model's own parameters are 16-bit: then they are the only copy there is."""
    half = [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(val := node.meta.get("example_value"), Parameter)
        and val.dtype in HALF_DTYPES
        and val.requires_grad
    ]
    if half:
        dtype = str(half[0].meta["example_value"].dtype).removeprefix("torch.")
        warnings.warn(
            f"mpcompile: {len(half)} parameters are {dtype} ({source_of(half[0])} is the first). "
            "They are trained as written: updates below half a unit in their last place are lost. "
            "Keep the model in float32: mpcompile casts inside the step.",
            stacklevel=2,
        )


def computes_with_grad(gm: GraphModule) -> bool:
    """Whether Dynamo's graph computes anything outside its own and outer ``no_grad``."""
    enabled = torch.is_grad_enabled()
    for node in gm.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif enabled and node.op in ("call_function", "call_method"):
            return True
    return False
