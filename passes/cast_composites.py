"""Cast the inputs of ops whose kernel is chosen by dtype while they are traced.

``scaled_dot_product_attention`` takes the flash and cuDNN kernels for 16-bit inputs only; by the
time ATen is reached the choice is made. So its inputs are cast here, in Dynamo's graph, and its
result is cast back, which leaves every dtype of the program as it is; later passes drop the casts
that turn out to be needless.

What only this graph shows is marked for the later passes: a user's ``.float()``, regions of
``autocast(enabled=False)``, and losses that the precision table knows by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node

from mpcompile.graph.nodes import user_line
from mpcompile.graph.pins import Pin, PinScope, set_pin
from mpcompile.pass_base import GraphPass, PassContext, Stage

_ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
_MATRIX_PRODUCTS = frozenset(
    """matmul mm bmm addmm baddbmm addbmm mv addmv addr einsum linear bilinear conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention chain_matmul
    multi_head_attention_forward tensordot dot vdot inner outer __matmul__ __rmatmul__""".split()
)
_VIEWS = frozenset(
    """view reshape flatten unflatten t T mT transpose permute movedim swapaxes swapdims expand
    expand_as squeeze unsqueeze narrow chunk split unbind select getitem __getitem__ contiguous
    view_as detach unfold getattr""".split()
)


@dataclass(frozen=True)
class CastComposites(GraphPass):
    """Give attention 16-bit inputs and mark what the user pinned.

    Requires: Dynamo's graph with ``meta["example_value"]``.
    Ensures: no dtype that the program sees changes; marks are metadata only.
    """

    name: ClassVar[str] = "cast-composites"
    stage: ClassVar[Stage] = Stage.DYNAMO
    exact: ClassVar[bool] = False
    off: ClassVar[str] = "attention keeps the kernel that fp32 inputs give; pins are not seen"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of attention calls whose inputs were cast."""
        if ctx.half is torch.float32:
            return 0
        pinned = _mark_user_casts(gm.graph)
        regions = _mark_regions(gm.graph)
        _mark_composites(gm.graph, ctx.table.composites.keys())
        calls = [node for node in gm.graph.nodes if _match_attention(node)]
        free = [node for node in calls if node not in regions and not _is_all_pinned(node, pinned)]
        for node in free:
            _cast_attention(node, ctx.half, keep_mask=ctx.table.keeps_products)
        return len(free)


def _name(node: Node) -> str:
    """Name of the function or method that ``node`` calls, ``matmul`` for ``operator.matmul``."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", ""))


def _example(node: Node) -> Tensor | None:
    val = node.meta.get("example_value")
    return val if isinstance(val, Tensor) else None


def _tensor_args(node: Node) -> list[Node]:
    return [arg for arg in node.all_input_nodes if _example(arg) is not None]


def _match_attention(node: Node) -> bool:
    """An attention call on fp32 inputs."""
    if node.op != "call_function" or node.target not in _ATTENTION:
        return False
    args = _tensor_args(node)
    return bool(args) and all(_is_f32_or_mask(arg) for arg in args)


def _is_f32_or_mask(node: Node) -> bool:
    val = _example(node)
    return val is not None and val.dtype in (torch.float32, torch.bool)


def _cast_attention(node: Node, half: torch.dtype, keep_mask: bool) -> None:
    """Cast query, key and value of an attention call, the mask where it must be, and the result."""
    pin = Pin(PinScope.OWN_CAST, "cast-composites: attention takes 16-bit inputs")
    graph = node.graph
    for arg in _tensor_args(node):
        val = _example(arg)
        assert val is not None
        if val.dtype is not torch.float32 or (keep_mask and _may_stay_fp32(node, arg)):
            continue
        with graph.inserting_before(node):
            held = _held_mask(graph, arg, half) if _is_mask(node, arg) else arg
            node.replace_input_with(arg, _call_to(graph, held, half, node, pin))
    set_pin(node, Pin(PinScope.PARTS, "inside attention"))
    result = node.meta["example_value"]
    node.meta["example_value"] = result.to(half)
    with graph.inserting_after(node):
        wide = _call_to(graph, node, torch.float32, node, pin)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _is_mask(node: Node, arg: Node) -> bool:
    return arg is _argument(node, 3, "attn_mask", None) and arg not in node.args[:3]


def _may_stay_fp32(node: Node, arg: Node) -> bool:
    """A mask beside 16-bit queries: CPU kernels add it in fp32, CUDA's want it in their dtype."""
    val = _example(arg)
    return val is not None and val.device.type == "cpu" and _is_mask(node, arg)


def _held_mask(graph: Graph, mask: Node, half: torch.dtype) -> Node:
    """Keep finite entries finite in ``half``: a row of float32's lowest is no row of -inf."""
    val = mask.meta["example_value"]
    clamped = graph.call_method("clamp", (mask, torch.finfo(half).min))
    infinite = graph.call_function(torch.isneginf, (mask,))
    held = graph.call_method("masked_fill", (clamped, infinite, float("-inf")))
    clamped.meta["example_value"] = held.meta["example_value"] = val
    infinite.meta["example_value"] = val.bool()
    return held


def _call_to(graph: Graph, source: Node, dtype: torch.dtype, beside: Node, pin: Pin) -> Node:
    made = graph.call_method("to", (source, dtype))
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
        if key in beside.meta:
            made.meta[key] = beside.meta[key]
    made.meta["example_value"] = source.meta["example_value"].to(dtype)
    set_pin(made, pin)
    return made


def _mark_user_casts(graph: Graph) -> set[Node]:
    """Mark what reads a value that the user cast to fp32; return those values and their views."""
    pinned: set[Node] = set()
    for node in graph.nodes:
        if _is_float_cast(node) or (_name(node) in _VIEWS and _reads_first(node, pinned)):
            pinned.add(node)
        elif (why := _pinned_reader(node, pinned)) is not None:
            scope = PinScope.OPERANDS if _is_product(node) else PinScope.READER
            set_pin(node, Pin(scope, why))
    return pinned


def _reads_first(node: Node, pinned: set[Node]) -> bool:
    return bool(node.args) and node.args[0] in pinned


def _pinned_reader(node: Node, pinned: set[Node]) -> str | None:
    """Return why ``node`` is pinned: it reads a pinned value, or only such if it multiplies."""
    if node.op not in ("call_function", "call_method"):
        return None
    read = [arg for arg in node.all_input_nodes if arg in pinned]
    if not read or (_is_product(node) and not _is_all_pinned(node, pinned)):
        return None
    return f"reads .float() of the user ({user_line(read[0]) or 'unknown line'})"


def _is_product(node: Node) -> bool:
    return _name(node) in _MATRIX_PRODUCTS


def _is_all_pinned(node: Node, pinned: set[Node]) -> bool:
    args = _tensor_args(node)
    return bool(args) and all(arg in pinned for arg in args)


def _is_float_cast(node: Node) -> bool:
    """``x.float()``, ``x.to(torch.float32)``, ``x.to(other)`` of an fp32 tensor, and the like."""
    if node.op != "call_method" or _example(node) is None:
        return False
    if node.target == "float":
        return True
    asked = [*node.args[1:], *node.kwargs.values()]
    return node.target in ("to", "type") and torch.float32 in asked


def _mark_regions(graph: Graph) -> set[Node]:
    """Pin what lies in ``autocast(enabled=False)``; return those nodes."""
    inside: set[Node] = set()
    for node, enabled in _with_autocast(graph):
        if enabled is False and node.op in ("call_function", "call_method"):
            why = f"in autocast(enabled=False) ({user_line(node) or 'unknown line'})"
            set_pin(node, Pin(PinScope.ALL, why))
            inside.add(node)
    return inside


def _with_autocast(graph: Graph) -> Iterator[tuple[Node, bool | None]]:
    """Pair every node with what the innermost autocast region around it says."""
    stack: list[tuple[Node, bool]] = []
    for node in graph.nodes:
        if node.target is _enter_autocast:
            stack.append((node, bool(_argument(node, 2, "enabled", True))))
        elif node.target is _exit_autocast:
            stack = [entry for entry in stack if entry[0] not in node.args]
        else:
            yield node, stack[-1][1] if stack else None


def _argument(node: Node, index: int, name: str, default: object) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _mark_composites(graph: Graph, names: Collection[str]) -> None:
    """Mark functions of ``torch.nn.functional`` and methods that a table knows by name."""
    for node in graph.nodes:
        name = _name_with_mode(node)
        if node.op == "call_function" and name in names:
            set_pin(node, Pin(PinScope.COMPOSITE, name))


def _name_with_mode(node: Node) -> str:
    name = _name(node)
    return f"{name}-{_argument(node, 3, 'mode', 'nearest')}" if name == "interpolate" else name
