"""From the ATen graph of a traced optimizer step to expressions.

Nothing here knows an optimizer: each node becomes an expression of the leaves it reads. Tensors
shaped like the parameter become elementwise expressions; 0-dim tensors and Python numbers become
uniform ones, in the dtype eager computes them in; full reductions join the two. What is left
(a matrix product, a row mean) stays an ATen call on whole tensors, between two phases of the
kernel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mpcompile.codegen import aten_rules as rules
from mpcompile.codegen.expr import Constant, Expr, apply, cast, constant, load, reduce, scalar
from mpcompile.codegen.expr import postorder, select
from mpcompile.errors import CodegenError

aten = torch.ops.aten
DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.bool: "bool",
}

NUM_ELEMENTS = "num_elements"
"""The leaf that holds how many elements the tensor has."""


_WITHOUT_VALUE = (
    aten.copy_.default,  # what functionalize appends; the outputs say the same
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


@dataclass(frozen=True)
class Leaf:
    """What a placeholder stands for. ``owner`` is the tensor it belongs to, or -1 if shared."""

    name: str
    owner: int


@dataclass(frozen=True)
class Value:
    """What a node computes. ``shape`` is None for a Python number; ``owner`` as in ``Leaf``."""

    expr: Expr
    shape: tuple[int, ...] | None
    owner: int


@dataclass(frozen=True)
class Call:
    """An ATen call that stays one: ``result`` is the buffer it fills.

    ``args`` and ``kwargs`` hold ``Value`` where the graph has a node, else what the graph has.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: str
    index: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Extracted:
    """The values of the outputs of a graph, in order, and the calls they need, by owner."""

    outputs: list[Value] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)


def round_constant(value: float, dtype: str) -> Expr:
    """Return the literal ``value`` rounded to ``dtype``."""
    if dtype == "f32" and math.isfinite(value):
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if dtype in ("i64", "bool"):
        value = int(value)
    return constant(value, dtype)


def convert(expr: Expr, dtype: str) -> Expr:
    """Return ``expr`` as ``dtype``; literals are converted here."""
    if isinstance(expr, Constant) and dtype not in ("f16", "bf16"):
        return round_constant(expr.value, dtype)
    if dtype == "bool":
        return rules.truth(expr)
    return cast(expr, dtype)


def compute_dtype(dtype: str) -> str:
    """Return what ATen computes in for tensors of ``dtype``."""
    return "f32" if dtype in ("f16", "bf16") else dtype


class Extractor:
    """One walk over one graph. ``shapes`` gives the parameter shape of each owner."""

    def __init__(self, leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]]) -> None:
        self.leaves, self.shapes = leaves, shapes
        self.values: dict[Node, Value] = {}
        self.result = Extracted()
        self._placeholders = 0

    def run(self, gm: GraphModule) -> Extracted:
        """Return the outputs of ``gm`` as values.

        Raises:
            CodegenError: the update of one tensor reads another, or a node has no meaning here.
        """
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(gm, node)
            elif node.op == "output":
                flat = torch.utils._pytree.tree_leaves(node.args[0])
                self.result.outputs = [self._operand(arg) for arg in flat]
            elif node.target not in _WITHOUT_VALUE:
                self.values[node] = self._call(node)
        return self.result

    def _placeholder(self, node: Node) -> Value:
        leaf = self.leaves[self._placeholders]
        self._placeholders += 1
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return Value(scalar(leaf.name, _number_dtype(val)), None, leaf.owner)
        dtype, shape = self._tensor_dtype(node), tuple(val.shape)
        kind = scalar if shape == () else load
        return Value(kind(leaf.name, dtype), shape, leaf.owner)

    def _attribute(self, gm: GraphModule, node: Node) -> Value:
        """Return a tensor made from a literal; larger ones are not literals."""
        tensor = getattr(gm, str(node.target))
        if not isinstance(tensor, torch.Tensor) or tensor.dim() or tensor.dtype not in DTYPE_NAMES:
            raise CodegenError(f"fuse-updates: {node.format_node()} is a constant tensor.")
        return Value(constant(tensor.item(), DTYPE_NAMES[tensor.dtype]), (), -1)

    def _tensor_dtype(self, node: Node) -> str:
        dtype = node.meta["val"].dtype
        if dtype not in DTYPE_NAMES:
            raise CodegenError(
                f"fuse-updates: {node.format_node()} is {dtype}, which kernels do not compute in."
            )
        return DTYPE_NAMES[dtype]

    def _operand(self, arg: Any) -> Value:
        if isinstance(arg, Node):
            return self.values[arg]
        if isinstance(arg, bool):
            return Value(constant(arg, "bool"), None, -1)
        if isinstance(arg, int):
            return Value(constant(arg, "i64"), None, -1)
        if isinstance(arg, float):
            return Value(constant(arg, "f64"), None, -1)
        raise CodegenError(f"fuse-updates: an operand is {arg!r}, which is not a number.")

    def _call(self, node: Node) -> Value:
        val = node.meta.get("val")
        if node.target in rules.NUMBERS and not isinstance(val, torch.Tensor):
            args = [self._operand(arg) for arg in node.args]
            expr = rules.number(
                rules.NUMBERS[node.target], [a.expr for a in args], _number_dtype(val)
            )
            return Value(expr, None, self._owner(node, args))
        if node.target is aten._local_scalar_dense.default:
            source = self._operand(node.args[0])
            expr = convert(source.expr, _number_dtype(val))
            if source.shape not in ((), None):
                raise CodegenError(f"fuse-updates: {node.format_node()} reads one element.")
            return Value(expr, None, source.owner)
        if isinstance(val, torch.Tensor):
            value = self._pointwise(node) or self._reduction(node)
            return value if value is not None else self._opaque(node)
        return self._opaque(node)

    def _owner(self, node: Node, args: Sequence[Value]) -> int:
        owners = {arg.owner for arg in args} - {-1}
        if len(owners) > 1:
            raise CodegenError(
                f"fuse-updates: {node.format_node()} reads two parameters; "
                "an update that couples parameters has no kernel yet."
            )
        return owners.pop() if owners else -1

    def _is_element(self, shape: tuple[int, ...] | None, owner: int) -> bool:
        return shape in (None, ()) or (owner >= 0 and shape == self.shapes[owner])

    def _pointwise(self, node: Node) -> Value | None:
        """Return ``node`` as an expression of its operands' elements, if it is one."""
        expr_of = _POINTWISE.get(node.target)
        if node.target in rules.POINTWISE:
            expr_of = _plain
        elif node.target in rules.COMPARISONS:
            expr_of = _comparison
        elif node.target in rules.SAME_VALUE:
            expr_of = _same
        if expr_of is None:
            return None
        nodes = [a for a in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if a is not None]
        reads = [self.values[a] for a in nodes if isinstance(a, Node)]
        owner, shape = self._owner(node, reads), tuple(node.meta["val"].shape)
        if not all(self._is_element(v.shape, owner) for v in (*reads, Value(_NONE, shape, owner))):
            return None
        expr = expr_of(self, node, self._tensor_dtype(node))
        return None if expr is None else Value(expr, shape, owner)

    def _reduction(self, node: Node) -> Value | None:
        """Return a reduction of all elements, accumulated in f64."""
        if node.meta["val"].shape != () or not node.args or not isinstance(node.args[0], Node):
            return None
        source = self.values[node.args[0]]
        if node.target not in _REDUCTIONS or not self._is_element(source.shape, source.owner):
            return None
        if source.shape == ():
            return None
        expr = _REDUCTIONS[node.target](self, node, convert(source.expr, "f64"))
        if expr is None:
            return None
        return Value(convert(expr, self._tensor_dtype(node)), (), source.owner)

    def _opaque(self, node: Node) -> Value:
        """Keep ``node`` a call; its result is a buffer, or a 0-dim tensor, of its owner."""
        val = node.meta.get("val")
        args, kwargs = torch.utils._pytree.tree_map(
            lambda a: self._operand(a) if isinstance(a, Node) else a, (node.args, node.kwargs)
        )
        reads = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        owner = self._owner(node, reads)
        if not isinstance(val, torch.Tensor) or owner < 0 or not _is_pure(node):
            raise CodegenError(f"fuse-updates: no rule for {node.format_node()}.")
        calls = self.result.calls.setdefault(owner, [])
        name = f"{owner}:temp.{len(calls)}"
        dtype, shape = self._tensor_dtype(node), tuple(val.shape)
        calls.append(Call(node.target, tuple(args), tuple(kwargs.items()), name, None, shape, val.dtype))
        return Value((scalar if shape == () else load)(name, dtype), shape, owner)

    def number_of(self, arg: Any, dtype: str) -> Expr:
        """Return an operand as ``dtype``."""
        return convert(self._operand(arg).expr, dtype)


_NONE = constant(0, "bool")


def _is_pure(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable


def _number_dtype(val: Any) -> str:
    if isinstance(val, (bool, torch.SymBool)):
        return "bool"
    return "i64" if isinstance(val, (int, torch.SymInt)) else "f64"


def _plain(x: Extractor, node: Node, dtype: str) -> Expr | None:
    """Operands and result in one dtype."""
    at = compute_dtype(dtype)
    optional = rules.OPTIONAL.get(node.target, {})
    if set(node.kwargs) - set(optional):
        return None
    args = [x.number_of(arg, at) for arg in node.args]
    names = list(optional)[len(args) - _arity(node) :] if optional else []
    args += [x.number_of(node.kwargs.get(name, optional[name]), at) for name in names]
    return convert(rules.POINTWISE[node.target](*args), dtype)


def _arity(node: Node) -> int:
    """Return how many operands come before the optional ones."""
    return 3 if node.target in (aten.addcmul.default, aten.addcdiv.default) else 2


def _comparison(x: Extractor, node: Node, dtype: str) -> Expr:
    first = node.args[0]
    assert isinstance(first, Node)
    at = compute_dtype(x._tensor_dtype(first))
    other = x._operand(node.args[1])
    if at == "i64" and other.expr.dtype == "f64":
        at = "f64"
    name = rules.COMPARISONS[node.target]
    return rules.compare(name)(x.number_of(first, at), convert(other.expr, at))


def _same(x: Extractor, node: Node, dtype: str) -> Expr:
    return x.number_of(node.args[0], dtype)


def _copy(x: Extractor, node: Node, dtype: str) -> Expr:
    return x.number_of(node.args[1], dtype)


def _full(x: Extractor, node: Node, dtype: str) -> Expr | None:
    size = node.args[0]
    fill = node.args[1]
    if isinstance(size, (list, tuple)) and len(size) and x.shapes and tuple(size) not in x.shapes:
        return None
    return x.number_of(fill, dtype)


def _like(value: float) -> Any:
    return lambda x, node, dtype: convert(constant(value, "f64"), dtype)


def _where(x: Extractor, node: Node, dtype: str) -> Expr:
    condition, yes, no = node.args
    return select(x.number_of(condition, "bool"), x.number_of(yes, dtype), x.number_of(no, dtype))


def _clamp(x: Extractor, node: Node, dtype: str) -> Expr:
    at = compute_dtype(dtype)
    bounds = [*node.args[1:], None, None][:2]
    bounds = [node.kwargs.get(k, b) for k, b in zip(("min", "max"), bounds, strict=True)]
    low, high = (None if b is None else x.number_of(b, at) for b in bounds)
    return convert(rules.clamp(x.number_of(node.args[0], at), low, high), dtype)


def _index_put(x: Extractor, node: Node, dtype: str) -> Expr | None:
    """A masked write of one value."""
    base, indices, values, *_ = node.args
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], Node):
        return None
    mask, value = x.values[indices[0]], x._operand(values)
    if mask.expr.dtype != "bool" or value.shape not in ((), None):
        return None
    return select(mask.expr, convert(value.expr, dtype), x.number_of(base, dtype))


def _masked_fill(x: Extractor, node: Node, dtype: str) -> Expr:
    base, mask, value = node.args
    return select(x.number_of(mask, "bool"), x.number_of(value, dtype), x.number_of(base, dtype))


def _logical(name: str) -> Any:
    return lambda x, node, dtype: rules.logical(name)(*(x.number_of(a, "bool") for a in node.args))


def _isnan(x: Extractor, node: Node, dtype: str) -> Expr:
    value = x._operand(node.args[0]).expr
    value = cast(value, compute_dtype(value.dtype))
    return apply("ne", value, value, dtype="bool")


def _view(x: Extractor, node: Node, dtype: str) -> Expr | None:
    source = x._operand(node.args[0])
    return convert(source.expr, dtype) if source.shape == tuple(node.meta["val"].shape) else None


_POINTWISE: dict[object, Any] = {
    aten.copy.default: _copy,
    aten._to_copy.default: _same,
    aten.full.default: _full,
    aten.scalar_tensor.default: _same,
    aten.full_like.default: lambda x, node, dtype: x.number_of(node.args[1], dtype),
    aten.fill.Scalar: _copy,
    aten.fill.Tensor: _copy,
    aten.zeros_like.default: _like(0.0),
    aten.ones_like.default: _like(1.0),
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.index_put.default: _index_put,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.logical_and.default: _logical("and"),
    aten.logical_or.default: _logical("or"),
    aten.logical_not.default: _logical("not"),
    aten.bitwise_and.Tensor: _logical("and"),
    aten.bitwise_or.Tensor: _logical("or"),
    aten.bitwise_not.default: _logical("not"),
    aten.isnan.default: _isnan,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _view,
    aten.reshape.default: _view,
}


def _norm(x: Extractor, node: Node, element: Expr) -> Expr | None:
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    if len(node.args) > 2 and node.args[2]:
        return None
    if order in (2, 2.0):
        return apply("sqrt", reduce("sum", rules.mul(element, element), "f64"), dtype="f64")
    magnitude = apply("abs", element, dtype="f64")
    if order in (1, 1.0):
        return reduce("sum", magnitude, "f64")
    return reduce("max", magnitude, "f64") if order == math.inf else None


def _sum(x: Extractor, node: Node, element: Expr) -> Expr | None:
    return reduce("sum", element, "f64") if len(node.args) == 1 else None


def _mean(x: Extractor, node: Node, element: Expr) -> Expr | None:
    source = node.args[0]
    assert isinstance(source, Node)
    count = cast(scalar(f"{x.values[source].owner}:{NUM_ELEMENTS}", "i64"), "f64")
    return rules.div(reduce("sum", element, "f64"), count) if len(node.args) == 1 else None


_REDUCTIONS: dict[object, Any] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
}


def rename(expr: Expr, names: Mapping[str, str]) -> dict[Expr, Expr]:
    """Return the leaves of ``expr`` whose names change, mapped to the renamed leaves."""
    changed: dict[Expr, Expr] = {}
    for leaf in postorder([expr]):
        name = getattr(leaf, "buffer", None) or getattr(leaf, "name", None)
        if name in names and not leaf.args:
            build = load if hasattr(leaf, "buffer") else scalar
            changed[leaf] = build(names[name], leaf.dtype)
    return changed
