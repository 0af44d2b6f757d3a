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
from mpcompile.graph.factors import cast_to, is_float, multiply, widened, wrap_inhomogeneous
from mpcompile.graph.gradients import gradient_name, private_outputs
from mpcompile.graph.roles import GraphKind, InputRole, OutputRole, Roles
from mpcompile.graph.seeds import find_seeds, program_scales
from mpcompile.graph.writes import find_writes, keep_overflow, write_or_keep
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.runtime import scale_ops  # noqa: F401  # defines the ops
from mpcompile.runtime.scaled_region import ScaledRegion

_OPS = torch.ops.mpcompile
_PART = 2.0**-64
"""Of numbers just within the range, more can be added up than fit into memory."""
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
        if ctx.roles.kind is GraphKind.UPDATE:
            return _guard_writes(gm.graph, ctx.roles, ctx.scaled, ctx.input_names)
        if ctx.roles.kind is not GraphKind.TRAINING:
            return 0
        is_joint = InputRole.TANGENT in ctx.roles.inputs.values()
        seeds = find_seeds(gm.graph, is_differentiated=is_joint)
        count = 0
        if seeds:
            region = ctx.scaled.scale.add_region() if is_joint else ctx.scaled
            count += _scale_flat(gm.graph, seeds, region, ctx.updates_read)
            ctx.scaled.folded = region.folded
        return count + _scale_backward(gm.graph, ctx.roles, ctx.scaled, ctx.input_names)


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
    scale, inverse = _insert_factors(
        tangents, scaled.scale.handle, outside=True, own=program_scales(tangents)
    )
    products = set().union(*(_scale(tangent, scale) for tangent in tangents))
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


def _insert_factors(
    tangents: Sequence[Node], handle: str, outside: bool = False, own: Sequence[float] = ()
) -> tuple[Node, Node]:
    """Insert the op that gives scale and inverse behind the inputs.

    ``outside``: the tangents come from where the program may have scaled by itself; in the graph
    it scales them by ``own``.
    """
    args = (handle, list(tangents), outside, list(own))
    both = nodes.call_after(tangents[-1], _OPS.loss_scale.default, args, {})
    reader = next(user for user in tangents[0].users if user is not both)
    scale = nodes.pick_result(both, 0)  # behind the inverse, so that products are behind both
    inverse = nodes.pick_result(both, 1)
    for made in (both, scale, inverse):
        nodes.copy_tags(reader, made)
        nodes.mark_backward(made)
    return scale, inverse


def _scale(node: Node, scale: Node) -> set[Node]:
    """Let the readers of ``node`` have it scaled; return what they read.

    One that casts it gets it as it is before it is narrowed: 16 bits may have no room for it.
    """
    readers = [user for user in node.users if user is not scale.args[0]]
    product = multiply(widened(node), scale)
    if not nodes.is_backward(node):
        nodes.copy_tags(scale, product)
    narrow = cast_to(product, cast(Tensor, nodes.value(node)).dtype)
    for reader in readers:
        nodes.replace_input(reader, node, product if nodes.is_cast(reader) else narrow)
    return {product, narrow}


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
    name = names[cast(int, gradient.input)] if known else gradient_name(gradient.node)
    return name or f"%{gradient.node.name}"


def _numel(node: Node) -> float:
    """How many elements there are; many if that is only known when the graph runs."""
    sizes = cast(Tensor, nodes.value(node)).shape
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf


def _insert_sum(node: Node) -> Node:
    """Insert a sum behind ``node`` that is not finite exactly if an element is not.

    Halves are summed in float32, which has room for all of them; of wider numbers so small a part
    is taken that their sum has room. The largest magnitude would tell too, but ATen's CPU kernel
    for it takes twenty times as long.
    """
    aten = torch.ops.aten
    if cast(Tensor, nodes.value(node)).dtype is not torch.float16:
        node = nodes.call_after(node, aten.mul.Tensor, (node, _PART), {})
    kwargs = {"dtype": torch.float32} if nodes.is_half(node) else {}
    return nodes.call_after(node, aten.sum.default, (node,), kwargs)


# --- a backward that Dynamo traced: it begins where the loss is differentiated --------------------


def _scale_flat(
    graph: Graph, seeds: Sequence[Node], scaled: ScaledRegion, kept: Mapping[str, Sequence[int]]
) -> int:
    """Scale where backward begins, unscale what leaves it for anything but an update.

    An update unscales by itself, if all that it reads is scaled.
    """
    scaled.own_scale = min(program_scales(seeds))
    scale, inverse = _insert_factors(seeds[:1], scaled.scale.handle)
    products = set().union(*(_scale(seed, scale) for seed in seeds))
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
    noted = _insert_note(
        floats, [gradient_name(n) or f"%{n.name}" for n in floats], inverse, scaled
    )
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


def _guard_writes(graph: Graph, roles: Roles, scaled: ScaledRegion, names: Sequence[str]) -> int:
    """Keep overflows of gradients to be seen, and leave out what an overflowed step would write."""
    read = [node for node, role in roles.inputs.items() if role is InputRole.GRADIENT]
    writes = list(find_writes(graph))
    clips = [write for write in writes if write.target in read]
    bounded = any(nodes.op_name(node).replace("_foreach_", "") in _BOUNDS for node in graph.nodes)
    count = sum(keep_overflow(write) for write in clips if bounded)
    updates = [write for write in writes if write.target not in read]
    if not updates:
        return count
    skip = _insert_verdict([n for n in read if n.users and nodes.is_strided(n)], scaled, names)
    if skip is None:
        skip = _insert_skipping(updates[0].target, scaled)
    for write in updates:
        write_or_keep(write, skip)
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
