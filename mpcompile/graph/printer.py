"""Print a graph as text: one node a line, equal graphs give equal text.

%addmm: bf16[8,64] = aten.addmm(%primals_2, %x, %permute)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mpcompile.graph import nodes

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def format_dtype(dtype: torch.dtype) -> str:
    """Return the short name of ``dtype``, ``bf16`` for ``torch.bfloat16``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def format_value(val: Any) -> str:
    """Return ``f32[2,4]`` for a tensor, ``(f32[2], f32[2])`` for several, ``Sym(s0)`` and so on."""
    if isinstance(val, Tensor):
        return f"{format_dtype(val.dtype)}[{','.join(str(size) for size in val.shape)}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(format_value(part) for part in val)})"
    return (
        f"Sym({val})"
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))
        else str(val)
    )


def format_node(node: Node) -> str:
    """Return the line of one node."""
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    shape = format_value(nodes.value(node)) if "val" in node.meta else "?"
    head = f"%{node.name}: {shape} = "
    if node.op in ("placeholder", "get_attr"):
        return head + (node.op if node.op == "placeholder" else f"get_attr[{node.target}]")
    arguments = [_format_argument(arg) for arg in node.args]
    arguments += [f"{key}={_format_argument(arg)}" for key, arg in node.kwargs.items()]
    name = nodes.op_name(node) if node.op == "call_function" else f".{node.target}"
    return f"{head}{name}({', '.join(arguments)})"


def _format_argument(argument: Any) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(_format_argument(part) for part in argument)}]"
    if isinstance(argument, torch.dtype):
        return format_dtype(argument)
    return str(argument)


def format_graph(graph: Graph) -> str:
    """Return the whole graph, one node a line, in order."""
    return "\n".join(format_node(node) for node in graph.nodes)
