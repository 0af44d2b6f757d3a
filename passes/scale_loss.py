"""Scale gradients while they are 16-bit, and find out whether one overflowed.

float16 has no room for small gradients: below 2**-24 they are zero. So backward begins with its
tangents times a power of two, and what leaves it is divided again: a gradient that the program sees
is the true one. Each graph scales for itself, whatever its neighbours do.

Where gradients are written to in place, a clamp must not make an overflow look like a large value;
where a graph is an update, it writes what was there before if it is to be skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from mpcompile.graph import nodes
from mpcompile.graph.factors import is_float, multiply, widened, wrap_inhomogeneous
from mpcompile.graph.gradients import private_outputs
from mpcompile.graph.roles import GraphKind, InputRole, OutputRole, Roles, written_input
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.runtime import scale_ops  # noqa: F401  # defines the ops
from mpcompile.runtime.loss_scale import ScaledRegion

_OPS = torch.ops.mpcompile
_COPIES = frozenset({"aten.clone", "aten._to_copy"})
_BOUNDS = frozenset(
    f"aten.{op}"
    for op in """clamp clamp_min clamp_max nan_to_num where hardtanh minimum maximum fmin fmax
    masked_fill""".split()
)


@dataclass(frozen=True)
class ScaleLoss(GraphPass):
    """Scale tangents, unscale gradients, note overflows; guard updates that are graphs.

    Requires: functional ATen graph with roles; ``insert-casts`` ran, so gradients are fp32 again.
    Ensures: the program sees the values that it sees without the pass, rounding in 16 bits aside;
    nothing is read on the host.
    """

    name: ClassVar[str] = "scale-loss"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = False
    runs_after: ClassVar[tuple[str, ...]] = ("insert-casts",)
    off: ClassVar[str] = "float16 without scaling: small gradients are lost, overflows are not seen"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``gm`` and return the number of values that were scaled, unscaled or guarded."""
        if ctx.scaled is None:
            return 0
        assert ctx.roles is not None
        seeds = _match_seeds(gm.graph)
        if seeds:
            return _scale_flat(gm.graph, seeds, ctx.scaled, ctx.updates_read)
        if ctx.roles.kind is GraphKind.TRAINING:
            return _scale_backward(gm.graph, ctx.roles, ctx.scaled, ctx.input_names)
        if ctx.roles.kind is GraphKind.UPDATE:
            return _guard_writes(gm.graph, ctx.roles, ctx.scaled, ctx.input_names)
        return 0


# --- backward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradient:
    """A scaled value, who reads it unscaled, and whose gradient it is (None if unknown)."""

    node: Node
    readers: tuple[Node, ...]
    input: int | None = None


def _scale_backward(graph: Graph, roles: Roles, scaled: ScaledRegion, names: Sequence[str]) -> int:
    tangents = [
        node
        for node, role in roles.inputs.items()
        if role is InputRole.TANGENT and node.users and is_float(node)
    ]
    gradients = list(_match_gradients(graph, roles))
    if not tangents or not gradients:
        return 0
    scaled.fed = tuple(g.input for g in gradients if g.input is not None)
    scale, inverse = _insert_factors(tangents, scaled.scale.handle)
    products = {_scale(tangent, scale) for tangent in tangents}
    inside = _scaled_nodes(graph, products, set())
    true_values = wrap_inhomogeneous(graph, inside, scale, inverse)
    gradients = list(_match_gradients(graph, roles))  # some may be tangents as they came
    return len(tangents) + len(true_values) + _unscale(gradients, inverse, scaled, names)


def _match_gradients(graph: Graph, roles: Roles) -> Iterator[_Gradient]:
    """Yield each value that leaves as a gradient once, in the order in which they are computed."""
    output = graph.output_node()
    values = cast(Sequence[Any], output.args[0])
    descs = output.meta.get("desc") or (None,) * len(values)
    found = {
        value: desc
        for value, desc, role in zip(values, descs, roles.outputs, strict=True)
        if role is OutputRole.GRADIENT and isinstance(value, Node) and is_float(value)
    }
    for node in graph.nodes:
        if node in found:
            yield _Gradient(node, (output,), _input_of(found[node]))


def _input_of(desc: object) -> int | None:
    source = desc.grad_of if isinstance(desc, GradAOTOutput) else None
    return source.idx if isinstance(source, PlainAOTInput) else None


def _insert_factors(tangents: Sequence[Node], handle: str) -> tuple[Node, Node]:
    """Insert the op that gives scale and inverse behind the inputs."""
    both = nodes.call_after(tangents[-1], _OPS.loss_scale.default, (handle, list(tangents)), {})
    reader = next(user for user in tangents[0].users if user is not both)
    scale = nodes.pick_result(both, 0)  # behind the inverse, so that products are behind both
    inverse = nodes.pick_result(both, 1)
    for made in (both, scale, inverse):
        nodes.copy_tags(reader, made)
        nodes.mark_backward(made)
    return scale, inverse


def _scale(node: Node, scale: Node) -> Node:
    """Let the readers of ``node`` have it scaled; return what they read."""
    readers = [user for user in node.users if user is not scale.args[0]]
    product = multiply(node, scale)
    if node.op == "placeholder":
        nodes.copy_tags(scale, product)
    for reader in readers:
        nodes.replace_input(reader, node, product)
    return product


def _unscale(
    gradients: Sequence[_Gradient],
    inverse: Node,
    scaled: ScaledRegion,
    names: Sequence[str],
) -> int:
    """Divide what leaves; the smallest by a factor that only noting overflows gives.

    So whatever orders or drops nodes keeps the op that notes. It must not be one that is read
    before all gradients are there; the last is not.
    """
    asked = [g for g in gradients if nodes.is_strided(g.node)]
    factors = dict.fromkeys(gradients, inverse)
    if asked:
        called = [_name(g, names) for g in asked]
        noted = _insert_note([g.node for g in asked], called, inverse, scaled)
        late = [g for g in asked if all(noted < reader for reader in g.readers)]
        factors[min(late, key=lambda g: _numel(g.node))] = noted
    for gradient, factor in factors.items():
        true = multiply(_unrounded(gradient), factor)
        for reader in gradient.readers:
            nodes.replace_input(reader, gradient.node, true)
    return len(gradients)


def _unrounded(gradient: _Gradient) -> Node:
    """Return the value to unscale, in fp32 where only the runtime sees it and takes any dtype."""
    output = gradient.node.graph.output_node()
    private = private_outputs(gradient.node.graph)
    values = cast(Sequence[Any], output.args[0])
    at = {index for index, value in enumerate(values) if value is gradient.node}
    return (
        widened(gradient.node) if gradient.readers == (output,) and at <= private else gradient.node
    )


def _name(gradient: _Gradient, names: Sequence[str]) -> str:
    known = gradient.input is not None and gradient.input < len(names)
    return names[cast(int, gradient.input)] if known else f"%{gradient.node.name}"


def _numel(node: Node) -> float:
    """How many elements there are; many if that is only known when the graph runs."""
    sizes = cast(Tensor, nodes.value(node)).shape
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf


def _insert_sum(node: Node) -> Node:
    """Insert the sum behind ``node``: it is not finite if an element is not.

    A sum of finite numbers that is beyond float32 counts as an overflow too. The largest magnitude
    would be exact, but ATen's CPU kernel for it takes twenty times as long.
    """
    kwargs = {"dtype": torch.float32} if nodes.is_half(node) else {}
    return nodes.call_after(node, torch.ops.aten.sum.default, (node,), kwargs)


# --- a backward that Dynamo traced: it begins where the loss is differentiated --------------------


def _match_seeds(graph: Graph) -> list[Node]:
    """Return the ones with which backward passes begin.

    A backward whose gradients are part of a later loss is left out: scaled twice, the second would
    not be linear in its scale.
    """
    seeds = [
        node
        for node in graph.nodes
        if nodes.is_backward(node) and nodes.op_name(node) == "aten.ones_like"
    ]
    return [seed for seed in seeds if not _leads_to(seed, set(seeds) - {seed})]


def _leads_to(start: Node, ends: set[Node]) -> bool:
    pending, seen = [start], set[Node]()
    while pending:
        node = pending.pop()
        if node in ends:
            return True
        fresh = node.users.keys() - seen
        seen |= fresh
        pending += fresh
    return False


def _scale_flat(
    graph: Graph, seeds: Sequence[Node], scaled: ScaledRegion, kept: Mapping[str, Sequence[int]]
) -> int:
    """Scale where backward begins, unscale what leaves it for anything but an update.

    An update unscales by itself, if all that it reads is scaled.
    """
    factors = [_insert_factors([seed], scaled.scale.handle) for seed in seeds]
    products = {_scale(seed, scale) for seed, (scale, _) in zip(seeds, factors, strict=True)}
    scale, inverse = factors[0]  # the same for all: the scale changes between steps
    outputs = cast(Sequence[Any], graph.output_node().args[0])
    inside = _scaled_nodes(graph, products, _carriers(outputs, kept))
    folded = {h: at for h, at in kept.items() if all(outputs[i] in inside for i in at)}
    if folded.keys() != kept.keys():
        inside = _scaled_nodes(graph, products, _carriers(outputs, folded))
    scaled.folded = frozenset(folded)
    true_values = wrap_inhomogeneous(graph, inside, scale, inverse)
    outputs = cast(Sequence[Any], graph.output_node().args[0])  # some were replaced
    stay = {outputs[i] for at in folded.values() for i in at}
    exits = [
        _Gradient(node, readers)
        for node in graph.nodes
        if node in inside
        and is_float(node)
        and (readers := _outside(node, inside | true_values, stay))
    ]
    if len(folded) > 1 and not exits:
        _note_for_all([node for node in graph.nodes if node in stay], scale, inverse, scaled)
    return len(seeds) + len(true_values) + _unscale(exits, inverse, scaled, ())


def _note_for_all(found: Sequence[Node], scale: Node, inverse: Node, scaled: ScaledRegion) -> None:
    """Note overflows of gradients that stay scaled: several updates are to skip together.

    The smallest is multiplied by one, so that something in the graph needs the op.
    """
    floats = [node for node in found if nodes.is_strided(node) and is_float(node)]
    if not floats:
        return
    noted = _insert_note(floats, [f"%{node.name}" for node in floats], inverse, scaled)
    one = nodes.call_after(noted, torch.ops.aten.mul.Tensor, (noted, scale), {})
    smallest = min(floats, key=_numel)
    nodes.replace_input(smallest.graph.output_node(), smallest, multiply(smallest, one))


def _insert_note(
    found: Sequence[Node], names: Sequence[str], inverse: Node, scaled: ScaledRegion
) -> Node:
    """Insert the op that notes which of ``found`` overflowed, behind all of them."""
    sums = [_insert_sum(node) for node in found]
    scaled.prepare(cast(Tensor, nodes.value(sums[0])).device, names)
    args = (scaled.scale.handle, scaled.source, inverse, sums)
    return nodes.call_after(max(sums), _OPS.note_overflow.default, args, {})


def _carriers(outputs: Sequence[Any], kept: Mapping[str, Sequence[int]]) -> set[Node]:
    """Return the copies and views between backward and the outputs that stay scaled."""
    carriers = set[Node]()
    for position in (i for at in kept.values() for i in at):
        node = outputs[position]
        while isinstance(node, Node) and not nodes.is_backward(node):
            source = _carried(node)
            if source is None:
                break
            carriers.add(node)
            node = source
    return carriers


def _carried(node: Node) -> Any:
    """Return whose elements ``node`` repeats as they are, or None."""
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    if nodes.op_name(node) == "aten.copy":
        return node.args[1]
    return node.args[0] if is_view or nodes.op_name(node) in _COPIES else None


def _scaled_nodes(graph: Graph, products: set[Node], carriers: set[Node]) -> set[Node]:
    """Return what backward computes from scaled values, and what carries that on."""
    inside = set(products)
    for node in graph.nodes:
        belongs = nodes.is_backward(node) or node in carriers
        computes = node.op == "call_function" and (is_float(node) or nodes.is_tuple(node))
        if belongs and computes and inside.intersection(node.all_input_nodes):
            inside.add(node)
    return inside


def _outside(node: Node, inside: set[Node], stay: set[Node]) -> tuple[Node, ...]:
    """Return who reads ``node`` and is to see the true value."""
    readers = [user for user in node.users if user not in inside]
    return tuple(user for user in readers if not (user.op == "output" and node in stay))


# --- updates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Write:
    """A write of ``source`` into the input ``target``."""

    node: Node
    target: Node
    source: Node


def _match_writes(graph: Graph) -> list[_Write]:
    found = ((node, written_input(node)) for node in graph.nodes)
    return [
        _Write(node, target, source)
        for node, target in found
        if target is not None and isinstance(source := node.args[1], Node)
    ]


def _guard_writes(graph: Graph, roles: Roles, scaled: ScaledRegion, names: Sequence[str]) -> int:
    """Keep overflows of gradients to be seen, and leave out what an overflowed step would write."""
    read = [node for node, role in roles.inputs.items() if role is InputRole.GRADIENT]
    writes = _match_writes(graph)
    clips = [write for write in writes if write.target in read]
    bounded = any(nodes.op_name(node).replace("_foreach_", "") in _BOUNDS for node in graph.nodes)
    count = sum(_keep_overflow(write) for write in clips if bounded)
    updates = [write for write in writes if write.target not in read]
    if not updates:
        return count
    skip = _insert_verdict([n for n in read if n.users and nodes.is_strided(n)], scaled, names)
    if skip is None:
        skip = _insert_skipping(updates[0].target, scaled)
    for write in updates:
        _write_or_keep(write, skip)
    return count + len(updates)


def _insert_verdict(
    read: Sequence[Node], scaled: ScaledRegion, names: Sequence[str]
) -> Node | None:
    """Insert the op that says whether an update that reads these gradients is skipped."""
    if not read:
        return None
    sums = [_insert_sum(node) for node in read]
    device = cast(Tensor, nodes.value(sums[0])).device
    scaled.prepare(device, [_input_name(node, names) for node in read])
    scaled.updates = True
    args = (scaled.scale.handle, scaled.source, sums)
    return nodes.call_after(max(sums), _OPS.skip_update.default, args, {})


def _insert_skipping(like: Node, scaled: ScaledRegion) -> Node:
    """Insert the op that says whether an update was skipped before: an average follows it, say."""
    scaled.scale.state(cast(Tensor, nodes.value(like)).device)
    return nodes.call_after(like, _OPS.skipping.default, (scaled.scale.handle, like), {})


def _input_name(node: Node, names: Sequence[str]) -> str:
    desc = node.meta.get("desc")
    if isinstance(desc, PlainAOTInput) and desc.idx < len(names):
        return names[desc.idx]
    return f"%{node.name}"


def _keep_overflow(write: _Write) -> bool:
    """Write a gradient that is not finite as it was: the update is to see it."""
    if not is_float(write.target):
        return False
    aten = torch.ops.aten
    size = nodes.call_after(write.target, aten.abs.default, (write.target,), {})
    finite = nodes.call_after(size, aten.lt.Scalar, (size, float("inf")), {})
    chosen = (finite, write.source, write.target)
    kept = nodes.call_after(max(finite, write.source), aten.where.self, chosen, {})
    nodes.replace_input(write.node, write.source, _as_written(kept, write))
    return True


def _write_or_keep(write: _Write, skip: Node) -> None:
    """Write what was there before if the step is skipped."""
    chosen = (skip, write.target, write.source)
    kept = nodes.call_after(max(skip, write.source), torch.ops.aten.where.self, chosen, {})
    nodes.replace_input(write.node, write.source, _as_written(kept, write))


def _as_written(value: Node, write: _Write) -> Node:
    """Give ``value`` the strides of what was written before."""
    val = cast(Tensor, nodes.value(write.source))
    if nodes.has_same_strides(cast(Tensor, nodes.value(value)), val):
        return value
    return nodes.insert_strided_copy(value, tuple(val.shape), tuple(val.stride()))
