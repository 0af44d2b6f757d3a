"""``mpcompile::recurrent``: an LSTM, GRU or RNN as one op, so that no graph holds its time steps.

It runs the kernels that eager runs. Its backward runs the layer again and differentiates that: what
the kernels save for backward has no shape that a graph could know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KINDS: dict[Callable[..., Any], str] = {
    getattr(torch, kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
"""Torch's functions with their names."""

_OPTIONS = (
    "str kind, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, "
    "bool batch_first"
)
_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define(
    f"recurrent(Tensor input, Tensor[] states, Tensor[] weights, bool[] trained, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    f"recurrent_backward(Tensor?[] grads, Tensor input, Tensor[] states, Tensor[] weights, "
    f"bool[] trained, {_OPTIONS}) -> Tensor[]"
)

Outputs = tuple[Tensor, Tensor, Tensor]


@contextmanager
def _recording() -> Iterator[None]:
    """Record for autograd inside an op, where the dispatcher has left autograd behind."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(torch._C.DispatchKey.AutogradFunctionality)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _run(
    input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: str, *options: Any
) -> Outputs:
    """Return the output and the last states; other layers than LSTM have one state, and a dummy."""
    start = list(states) if kind == "lstm" else states[0]
    output, *last = getattr(torch, kind)(input, start, list(weights), *options)
    if kind != "lstm":
        return output, *last, input.new_empty(0)
    # oneDNN's in torch 2.11 has one dimension more where it is recorded inside an op.
    hidden, cell = (new.view_as(old) for new, old in zip(last, states, strict=True))
    return output, hidden, cell


def _leaves(tensors: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor]:
    """Return ``tensors`` cut off from their history, with the flags that eager's have."""
    return [
        tensor.detach().requires_grad_(is_trained)
        for tensor, is_trained in zip(tensors, trained, strict=True)
    ]


def _forward(
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    trained: Sequence[bool],
    kind: str,
    *options: Any,
) -> Outputs:
    """Run the layer; ``trained`` says of input, states and weights what requires grad in eager.

    Kernels are chosen by that too, although nothing is recorded here.
    """
    leaves = _leaves((input, *states, *weights), trained)
    split = 1 + len(states)
    return _run(leaves[0], leaves[1:split], leaves[split:], kind, *options)


def _backward(
    grads: Sequence[Tensor | None],
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    trained: Sequence[bool],
    kind: str,
    *options: Any,
) -> list[Tensor]:
    """Return a gradient for each of input, states and weights that requires one."""
    leaves = _leaves((input, *states, *weights), trained)
    num_states = len(states)
    inner, last = leaves[1 : 1 + num_states], leaves[1 + num_states :]
    with _recording():
        outputs = _run(leaves[0], inner, last, kind, *options)
    given = zip(outputs, grads, strict=True)
    pairs = [(o, g) for o, g in given if g is not None and o.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if grad is None else grad.contiguous()
        for leaf, grad in zip(wanted, found, strict=True)
    ]


def _fake_forward(
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    trained: Sequence[bool],
    kind: str,
    *options: Any,
) -> Outputs:
    directions = 2 if options[4] else 1
    output = input.new_empty(*input.shape[:-1], directions * states[0].shape[-1])
    if options[5] and input.dim() == 3:  # batch_first: kernels work with time first
        output = output.transpose(0, 1).contiguous().transpose(0, 1)
    cell = torch.empty_like(states[1]) if kind == "lstm" else input.new_empty(0)
    return output, torch.empty_like(states[0]), cell


def _fake_backward(
    grads: Sequence[Tensor | None],
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    trained: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    leaves = zip((input, *states, *weights), trained, strict=True)
    contiguous = torch.contiguous_format
    return [
        torch.empty_like(leaf, memory_format=contiguous)
        for leaf, is_trained in leaves
        if is_trained
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    input, states, weights, ctx.trained, *ctx.options = inputs
    ctx.num_states = len(states)
    ctx.save_for_backward(input, *states, *weights)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    input, *others = ctx.saved_tensors
    split = 1 + ctx.num_states
    states, weights = others[: ctx.num_states], others[ctx.num_states :]
    found = iter(
        torch.ops.mpcompile.recurrent_backward(
            list(grads), input, states, weights, ctx.trained, *ctx.options
        )
    )
    flat = [next(found) if is_trained else None for is_trained in ctx.trained]
    return flat[0], flat[1:split], flat[split:], None, *[None] * len(ctx.options)


_LIBRARY.impl("recurrent", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrent_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::recurrent", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("mpcompile::recurrent_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd(
    "mpcompile::recurrent", _differentiate, setup_context=_setup, lib=_LIBRARY
)
