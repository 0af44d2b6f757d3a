"""Whether an op passes a factor on: what it makes of scaled gradients is scaled by as much.

Autograd's own ops do, being linear in the gradient. What users put into backward may not: a hook
that clips, an ``autograd.Function`` that divides by a norm plus an epsilon. Such ops are named
here, and arithmetic is looked at by its operands. An op that reads two scaled values passes the
factor on only if it is known to add them up or put them side by side: the gradient of a convolution
is linear in the gradient and in what was convolved, and that may be a gradient as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import Node

from mpcompile.graph import nodes

_NEVER = frozenset(
    f"aten.{op}"
    for op in """clamp clamp_min clamp_max hardtanh hardshrink softshrink threshold nan_to_num sign
    sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal pow square tanh sigmoid sin cos
    atan asin acos sinh cosh erf gelu silu softplus softmax _softmax _log_softmax logsumexp round
    floor ceil trunc frac fmod remainder var std prod cumprod dot vdot gt ge lt le eq ne
    isclose""".split()
)
_JOINTLY_LINEAR = frozenset(
    """aten.cat aten.stack aten.copy aten.index_put aten.index_add aten.index_copy
    aten.scatter aten.scatter_add aten.masked_scatter aten.slice_scatter aten.select_scatter
    aten.diagonal_scatter aten.as_strided_scatter aten.complex
    aten._thnn_fused_lstm_cell_backward_impl aten._cudnn_rnn_backward
    mpcompile.recurrent_backward mpcompile.note_overflow""".split()
)
"""Linear in all values that may be gradients, taken together."""
_ZEROS = frozenset(f"aten.{op}" for op in "zeros zeros_like new_zeros".split())
_FILLED = {"aten.full": 1, "aten.full_like": 1, "aten.new_full": 2, "aten.scalar_tensor": 0}


def passes_factor_on(node: Node, scaled: Collection[Node]) -> bool:
    """Whether the result of ``node`` has the factor that those of its inputs in ``scaled`` have."""
    name = nodes.op_name(node)
    if name in _NEVER:
        return False
    rule = _BY_OPERANDS.get(name)
    if rule is not None:
        return rule(node, scaled)
    return name in _JOINTLY_LINEAR or len(set(node.all_input_nodes).intersection(scaled)) == 1


def _is_sum(node: Node, scaled: Collection[Node]) -> bool:
    """All operands have the factor; zero has any."""
    return all(_has_factor(arg, scaled) for arg in node.args[:2])


def _is_choice(node: Node, scaled: Collection[Node]) -> bool:
    return all(_has_factor(arg, scaled) for arg in node.args[1:3])


def _is_filled(node: Node, scaled: Collection[Node]) -> bool:
    return _has_factor(node.args[0], scaled) and _has_factor(node.args[2], scaled)


def _is_product(node: Node, scaled: Collection[Node]) -> bool:
    """One operand has the factor, and no other."""
    return sum(arg in scaled for arg in node.args[:2] if isinstance(arg, Node)) == 1


def _is_quotient(node: Node, scaled: Collection[Node]) -> bool:
    return node.args[1] not in scaled


def _has_factor(arg: object, scaled: Collection[Node]) -> bool:
    if not isinstance(arg, Node):
        return bool(arg == 0)
    return arg in scaled or _is_zero(arg)


def _is_zero(node: Node) -> bool:
    name = nodes.op_name(node) if node.op == "call_function" else ""
    if name in ("aten.expand", "aten.view", "aten._to_copy") and isinstance(node.args[0], Node):
        return _is_zero(node.args[0])
    position = _FILLED.get(name)
    return name in _ZEROS or (position is not None and bool(node.args[position] == 0))


_BY_OPERANDS: dict[str, Callable[[Node, Collection[Node]], bool]] = {
    "aten.add": _is_sum,
    "aten.sub": _is_sum,
    "aten.maximum": _is_sum,
    "aten.minimum": _is_sum,
    "aten.mul": _is_product,
    "aten.mm": _is_product,
    "aten.bmm": _is_product,
    "aten.div": _is_quotient,
    "aten.where": _is_choice,
    "aten.masked_fill": _is_filled,
}
