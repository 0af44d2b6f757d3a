"""Decompose a traced graph node by node, behind the passes.

What a node becomes depends on its op and on the types of its arguments alone, so each such pair is
traced once and copied for every node that has it: a model of many equal layers costs one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.graph import nodes

Table = Mapping[OpOverload, Callable[..., Any]]


def expand_decompositions(gm: GraphModule, table: Table) -> int:
    """Replace each node whose op is in ``table`` by what its decomposition gives; return how many.

    The new nodes carry the tags of the node that they stand for.
    """
    traced: dict[object, GraphModule | None] = {}
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in table:
            continue
        key = _signature(node)
        if key not in traced:
            traced[key] = _trace(node, table)
        expansion = traced[key]
        if expansion is not None:
            _replace(gm, node, expansion.graph)
            count += 1
    gm.recompile()
    return count


def _flat_arguments(node: Node) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten((node.args, node.kwargs))


def _signature(node: Node) -> object:
    flat, spec = _flat_arguments(node)
    return (node.target, str(spec), tuple(_describe(leaf) for leaf in flat))


def _describe(leaf: Any) -> object:
    val = nodes.value(leaf) if isinstance(leaf, Node) else leaf
    if isinstance(val, Tensor):
        layout = (str(tuple(val.shape)), str(tuple(val.stride())), str(val.storage_offset()))
        return (val.dtype, val.device, *layout)
    return (isinstance(leaf, Node), type(val), str(val))


def _trace(node: Node, table: Table) -> GraphModule | None:
    """Trace the decomposition on the fake values of ``node``; None if it declines."""
    flat, spec = _flat_arguments(node)
    inputs = [leaf for leaf in flat if isinstance(leaf, Node)]

    def call(*values: Any) -> Any:
        remaining = iter(values)
        filled = [next(remaining) if isinstance(leaf, Node) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return cast(Any, node.target)(*args, **kwargs)

    with nodes.fake_mode(node.graph) or nullcontext():
        traced = make_fx(call, decomposition_table=dict(table), tracing_mode="real")(
            *[_distinct(nodes.value(leaf)) for leaf in inputs]
        )
    calls = [made.target for made in traced.graph.nodes if made.op == "call_function"]
    return None if calls == [node.target] else traced


def _distinct(val: Any) -> Any:
    """``make_fx`` tells its inputs apart by identity, and two nodes may share one fake tensor."""
    return val.detach() if isinstance(val, Tensor) else val


def _replace(gm: GraphModule, node: Node, expansion: Graph) -> None:
    flat, _ = _flat_arguments(node)
    actual: Iterator[Node] = iter([leaf for leaf in flat if isinstance(leaf, Node)])
    known: dict[Node, Node] = {}
    result: Any = None
    with gm.graph.inserting_before(node):
        for source in expansion.nodes:
            if source.op == "placeholder":
                known[source] = next(actual)
            elif source.op == "output":
                result = torch.fx.map_arg(source.args[0], known.__getitem__)
            else:
                known[source] = _copy(gm, source, known, node)
    _redirect_users(node, result)
    gm.graph.erase_node(node)


def _copy(gm: GraphModule, source: Node, known: dict[Node, Node], beside: Node) -> Node:
    made = gm.graph.node_copy(source, known.__getitem__)
    nodes.copy_tags(beside, made)
    if isinstance(beside.target, OpOverload):
        made.meta["original_aten"] = beside.target
    if source.op == "call_function":
        nodes.refresh_value(made)  # a value of its own: Inductor takes shared storage for an alias
    else:  # get_attr: a constant that the decomposition made
        made.target = _unused_name(gm, str(source.target))
        owner = cast(GraphModule, source.graph.owning_module)
        gm.register_buffer(made.target, getattr(owner, str(source.target)))
    return made


def _unused_name(gm: GraphModule, name: str) -> str:
    index = 0
    while hasattr(gm, f"{name}_{index}"):
        index += 1
    return f"{name}_{index}"


def _redirect_users(node: Node, result: Any) -> None:
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        assert nodes.is_getitem(user), f"{user} reads a tuple whole"
        picked = result[user.args[1]]
        if isinstance(picked, Node):
            user.replace_all_uses_with(picked)
        node.graph.erase_node(user)
