"""Insert, replace and read nodes: the only code that writes ``node.meta["val"]``.

A node that enters a graph here carries the fake value of what it computes and the tags of the node
that it stands beside, so that partitioners, checkpointing and error messages treat both alike.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})

# Node metadata that says where a node belongs. fwd_* is what AOTAutograd copies to backward nodes.
_TAGS = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "autograd_backward",
    "custom",
)


def value(node: Node) -> Any:
    """Return the fake value of ``node``: a tensor, a SymInt, a tuple of those, or None."""
    return node.meta.get("val")


def tensor_values(node: Node) -> list[Tensor]:
    """Return the fake tensors that ``node`` produces, in order."""
    val = value(node)
    if isinstance(val, Tensor):
        return [val]
    return [leaf for leaf in pytree.tree_leaves(val) if isinstance(leaf, Tensor)]


def dtype_of(node: Node) -> torch.dtype | None:
    """Return the dtype of a node that produces one tensor, else None."""
    val = value(node)
    return val.dtype if isinstance(val, Tensor) else None


def is_f32(node: Node) -> bool:
    """Whether ``node`` produces one float32 tensor."""
    return dtype_of(node) is torch.float32


def is_half(node: Node) -> bool:
    """Whether ``node`` produces one 16-bit floating tensor."""
    return dtype_of(node) in HALF_DTYPES


def is_strided(node: Node) -> bool:
    """Whether ``node`` gives one dense tensor, as opposed to a sparse one."""
    val = value(node)
    return isinstance(val, Tensor) and val.layout is torch.strided


def is_tuple(node: Node) -> bool:
    """Whether ``node`` has several results."""
    return isinstance(value(node), (tuple, list))


def op_name(node: Node) -> str:
    """Return the overload packet's name, ``aten.mm`` for ``aten.mm.default``."""
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def is_getitem(node: Node) -> bool:
    """Whether ``node`` picks one result of a node with several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_cast(node: Node) -> bool:
    """Whether ``node`` changes a tensor's dtype and nothing else that the user could see."""
    if node.op != "call_function" or node.target is not torch.ops.aten._to_copy.default:
        return False
    asked = {name for name, given in node.kwargs.items() if given is not None}
    return asked == {"dtype"}


def input_nodes(node: Node) -> list[Node]:
    """Return the tensor-valued inputs of ``node``, in order, repeats included."""
    return [arg for arg in _node_leaves(node) if isinstance(value(arg), Tensor)]


def _node_leaves(node: Node) -> list[Node]:
    """Return the nodes among the arguments, repeats included; ``all_input_nodes`` has each once."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


BACKWARD_MARK = "mpcompile_backward"
"""The key in ``meta["custom"]`` by which nodes of a traced backward are known in torch 2.11."""


def is_backward(node: Node) -> bool:
    """Whether autograd made ``node`` while it ran backward.

    torch 2.11 has the partitioner's tag, and in a graph that is not partitioned our own mark; a
    later one has its tag in such graphs.
    """
    tagged = node.meta.get("partitioner_tag") == "is_backward"
    marked = BACKWARD_MARK in (node.meta.get("custom") or ())
    return tagged or marked or bool(node.meta.get("autograd_backward"))


def root(node: Node) -> Node:
    """Return the node whose memory ``node`` shows: itself, unless it is a view."""
    while node.op == "call_function":
        origin = node.args[0] if is_getitem(node) or is_view(node) else None
        if not isinstance(origin, Node) or (is_getitem(node) and not is_view(origin)):
            break
        node = origin
    return node


def is_view(node: Node) -> bool:
    """Whether ``node`` shows the memory of its first input, as its schema says."""
    if not isinstance(node.target, OpOverload):
        return False
    infos = [result.alias_info for result in node.target._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def draws_random(node: Node) -> bool:
    """Whether ``node`` draws random numbers. Attention has the tag but does so for dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return bool(argument(node, "dropout_p", default=1.0) != 0)


def argument(node: Node, name: str, default: Any) -> Any:
    """Return what ``node`` gives for the parameter ``name`` of its op; ``default`` if it has none.

    A parameter that is not given has the value of the schema.
    """
    if not isinstance(node.target, OpOverload):
        return default
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            given = node.args[position] if position < len(node.args) else parameter.default_value
            return node.kwargs.get(name, given)
    return default


def module_path(node: Node) -> str:
    """Return the dotted path of the module whose forward made ``node``, or its gradient."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    return _dotted(paths[-1]) if paths else ""


def _dotted(path: str) -> str:
    """``L['self'].layers.0`` and ``G['net'].0`` name the user's objects: drop the scope."""
    for opening in ("L['", "G['"):
        if path.startswith(opening):
            name, _, rest = path[len(opening) :].partition("']")
            rest = rest.removeprefix(".")
            path = rest if name == "self" else ".".join(part for part in (name, rest) if part)
    return path.replace("_modules['", "").replace("']", "")


def user_line(node: Node) -> str:
    """Return ``file.py:12`` of the user's innermost line that led to ``node``, or ''."""
    frames = [
        line.strip()
        for line in (node.meta.get("stack_trace") or "").splitlines()
        if line.strip().startswith('File "')
    ]
    outside = [frame for frame in frames if "/site-packages/torch/" not in frame] or frames
    if not outside:
        return ""
    path, _, rest = outside[-1].removeprefix('File "').partition('", line ')
    return f"{path.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}"


def copy_tags(source: Node, target: Node) -> None:
    """Give ``target`` the tags of the node that it stands beside."""
    for tag in _TAGS:
        if tag in source.meta:
            target.meta[tag] = source.meta[tag]


def fake_mode(graph: Graph) -> FakeTensorMode | None:
    """Return the fake mode of the first fake tensor in ``graph``."""
    for node in graph.nodes:
        for leaf in tensor_values(node):
            mode = getattr(leaf, "fake_mode", None)
            if mode is not None:
                return cast(FakeTensorMode, mode)
    return None


def compute_value(node: Node) -> Any:
    """Run ``node`` on the fake values of its inputs and return what it gives.

    Raises whatever the op raises for its inputs; the caller knows how to word it.
    """
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    mode = fake_mode(node.graph)
    target = cast(Any, node.target)
    if mode is None:
        return target(*args, **kwargs)
    with mode:
        return target(*args, **kwargs)


def refresh_value(node: Node) -> None:
    """Recompute ``node.meta["val"]`` after an input changed its dtype.

    Sizes that depend on data keep their symbols: running the op again invents new ones, so only
    the dtype is taken from that.
    """
    if not has_unbacked_sizes(node):
        node.meta["val"] = compute_value(node)
        return
    mode = fake_mode(node.graph)
    assert mode is not None
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols(), mode:
        node.meta["val"] = pytree.tree_map(_with_dtype_of, value(node), compute_value(node))


def _with_dtype_of(was: Any, now: Any) -> Any:
    return was.to(now.dtype) if isinstance(was, Tensor) else was


def has_unbacked_sizes(node: Node) -> bool:
    """Whether a size of what ``node`` produces is known only when it runs."""
    return any(free_unbacked_symbols(tensor) for tensor in tensor_values(node))


def has_same_strides(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are laid out alike; as text, since comparing symbols would add guards."""
    return str(tuple(one.stride())) == str(tuple(other.stride()))


def is_dense(node: Node) -> bool:
    """Whether a copy of the tensor has its strides: no gaps, no element twice."""
    val = cast(Tensor, value(node))
    with fake_mode(node.graph) or nullcontext():
        return has_same_strides(torch.empty_like(val), val)


def set_value(node: Node, val: Any) -> None:
    """Set the fake value of a node that was built elsewhere."""
    node.meta["val"] = val


def call_after(
    anchor: Node, target: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Node:
    """Insert ``target(*args, **kwargs)`` behind ``anchor`` (behind all placeholders if it is one).

    The new node carries its fake value, and ``anchor``'s tags if that computes something.
    """
    graph = anchor.graph
    with graph.inserting_after(_last_placeholder(anchor)):
        node = graph.call_function(target, args, kwargs)
    if anchor.op != "placeholder":
        copy_tags(anchor, node)
    node.meta["val"] = compute_value(node)
    return node


def pick_result(source: Node, index: int) -> Node:
    """Insert a node that picks one of the results of ``source``, right behind it."""
    with source.graph.inserting_after(source):
        node = source.graph.call_function(operator.getitem, (source, index))
    copy_tags(source, node)
    node.meta["val"] = value(source)[index]
    return node


def mark_backward(node: Node) -> None:
    """Tag ``node`` as one that autograd made while it ran backward."""
    node.meta["partitioner_tag"] = "is_backward"
    node.meta["autograd_backward"] = True


def _last_placeholder(node: Node) -> Node:
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def insert_cast(source: Node, dtype: torch.dtype, user: Node) -> Node:
    """Insert a cast of ``source`` to ``dtype`` right behind it.

    ``user`` is the node that asked for it: it lends its tags where ``source`` is a graph input.
    """
    node = call_after(source, torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
    if source.op == "placeholder" and user.op != "output":
        copy_tags(user, node)
    return node


def replace_input(user: Node, old: Node, new: Node) -> None:
    """Let ``user`` read ``new`` wherever it read ``old``."""
    user.replace_input_with(old, new)


def erase_dead(graph: Graph, candidates: list[Node]) -> None:
    """Erase those of ``candidates`` that nothing reads, and what they alone kept alive."""
    pending = list(candidates)
    gone: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in gone or node.users or node.op != "call_function" or node.is_impure():
            continue
        pending.extend(node.all_input_nodes)
        graph.erase_node(node)
        gone.add(node)


def insert_strided_copy(source: Node, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Node:
    """Insert a copy of ``source`` laid out in ``stride`` (elements) right behind it."""
    val = cast(Tensor, value(source))
    empty = call_after(
        source,
        torch.ops.aten.empty_strided.default,
        (list(shape), list(stride)),
        {"dtype": val.dtype, "device": val.device},
    )
    copied = call_after(empty, torch.ops.aten.copy.default, (empty, source), {})
    copy_tags(source, copied)
    return copied
