"""Describe a region, so that equal texts mean equal graphs, decisions and reports.

What AOTAutograd's own key leaves out is here too, for passes and reports read it: lines and modules
of nodes, marks, names of inputs. Ids and addresses are left out: the text is the same in another
process.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from mpcompile.codegen.build import cpu_features
from mpcompile.graph import nodes

_LEFT_OUT = ("stack_trace", "nn_module_stack", "source_fn_stack", "grapharg", "seq_nr")
"""Metadata that holds ids, counts of the process, or is told by what is read of it."""


class IndescribableError(Exception):
    """Something that no text stands for, or whose values are not part of the graph."""


def describe(gm: GraphModule, inputs: Sequence[Any]) -> str:
    """Return the text of Dynamo's graph ``gm``, of ``inputs``, and of what torch is set to.

    Raises:
        IndescribableError: the graph holds tensors, or numbers that change are among its inputs.
    """
    return "\n".join([*_settings(), *map(_input, inputs), *_graph(gm)])


def _settings() -> Iterator[str]:
    yield f"torch {torch.__version__} {torch.version.git_version} {cpu_features()}"
    yield f"{torch.is_grad_enabled()} {torch.get_default_dtype()}"
    for device in ("cpu", "cuda"):
        yield f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    yield f"{torch.are_deterministic_algorithms_enabled()}"
    yield torch._inductor.config.get_hash().hex()
    yield torch._functorch.config.get_hash().hex()


def _input(value: Any) -> str:
    if isinstance(value, torch.SymFloat):
        raise IndescribableError("a number that changes")
    return _text(value)


def _graph(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        yield f"{node.name} {node.op} {_text((node.target, node.args, node.kwargs))}"
        yield f"{nodes.user_line(node)} {nodes.module_path(node)} {_text(_meta(node), _class_of)}"
        if node.op == "get_attr":
            held = getattr(gm, str(node.target), None)
            if not isinstance(held, GraphModule):
                raise IndescribableError(f"the constant {node.target}")
            yield from _graph(held)


def _meta(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _LEFT_OUT}


def _refuse(value: object) -> str:
    raise IndescribableError(f"a {_class_of(value)}")


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(value: Any, of_other: Callable[[object], str] = _refuse) -> str:
    """Return the text of arguments or metadata; ``of_other`` gives that of unknown objects."""
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(_text(item, of_other) for item in value)})"
    if isinstance(value, dict):
        pairs = (f"{_text(key, of_other)}: {_text(v, of_other)}" for key, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, slice):
        return _text((value.start, value.stop, value.step), of_other)
    spelling = next((text for kinds, text in _SPELLINGS if isinstance(value, kinds)), of_other)
    return spelling(value)


def _tensor(value: Tensor) -> str:
    kind = f"{type(value).__name__} {value.dtype} {value.device} {value.layout}"
    if value.layout is not torch.strided:
        return f"{kind} {_text(tuple(value.shape))}"
    layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    return f"{kind} {value.requires_grad} {value.is_leaf} {_text(layout)}"


_SPELLINGS: tuple[tuple[tuple[type, ...], Callable[[Any], str]], ...] = (
    ((type(None), bool, int, float, complex, str, bytes), repr),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format), repr),
    ((Node,), lambda node: f"%{node.name}"),
    ((Tensor,), _tensor),
    ((torch.SymInt, torch.SymFloat, torch.SymBool), lambda value: f"{value} {value.node.hint}"),
    ((enum.Enum, OpOverload, OpOverloadPacket, HigherOrderOperator), str),
    (
        (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
        lambda value: (
            f"{value.__module__}.{value.__qualname__}"
            if hasattr(value, "__module__")
            else value.__qualname__
        ),
    ),
)
