"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op each, in any step of ours.

Dynamo refuses them; told to trace them, it has all their time steps in the graph, which Inductor
does not finish compiling. With dropout between its layers, whose random numbers a backward that
runs them again could not repeat, each layer is an op of its own and dropout one of the graph.
Packed sequences break the graph at the layer; so does such dropout on CUDA, where cuDNN draws it.

Private torch API, seen in 2.11 to 2.14: ``config.allow_rnn`` (set where a step is traced),
``TorchInGraphFunctionVariable`` for ``torch.lstm`` and its like.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mpcompile.capture.dynamo_handlers import handle
from mpcompile.runtime import dispatch, recurrent


def install() -> None:
    """Replace the layers' functions while a step of ours is traced."""
    for function, kind in recurrent.KINDS.items():
        handle(function, functools.partial(_trace, kind))


def _trace(kind: str, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._dynamo.variables.functions import UserFunctionVariable

    if not dispatch.is_running():
        return None
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    if kwargs or len(args) != 9 or args[1].is_tensor() is (kind == "lstm"):
        _break(f"{kind} of a packed sequence")
    options = dict(zip(names, (a.as_python_constant() for a in args[3:]), strict=True))
    layer: Any = _lstm if kind == "lstm" else _of_kind(kind)
    if options["train"] and options["dropout"] and options["num_layers"] > 1:
        if args[0].as_proxy().node.meta["example_value"].is_cuda:
            _break(f"{kind} with dropout between its layers")
        layer = _with_dropout(layer)
    return UserFunctionVariable(layer).call_function(tx, list(args), {})


def _lstm(input: Any, states: Any, weights: Any, *options: Any) -> Any:
    hidden, cell = states
    trained = [leaf.requires_grad for leaf in (input, hidden, cell, *weights)]
    return torch.ops.mpcompile.recurrent(input, [hidden, cell], weights, trained, "lstm", *options)


@functools.cache
def _of_kind(kind: str) -> Any:
    def layer(input: Any, state: Any, weights: Any, *options: Any) -> Any:
        trained = [leaf.requires_grad for leaf in (input, state, *weights)]
        found = torch.ops.mpcompile.recurrent(input, [state], weights, trained, kind, *options)
        return found[0], found[1]

    return layer


@functools.cache
def _with_dropout(layer: Any) -> Any:
    """Return what runs the layers one by one, as torch's own kernels do on CPUs."""

    def stacked(
        input: Any,
        state: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = state if isinstance(state, (tuple, list)) else (state,)
        directions = 2 if bidirectional else 1
        size = len(weights) // num_layers
        last: list[list[Any]] = [[] for _ in states]
        for index in range(num_layers):
            mine = [item[index * directions : (index + 1) * directions] for item in states]
            part = weights[index * size : (index + 1) * size]
            start = tuple(mine) if len(mine) > 1 else mine[0]
            options = (has_biases, 1, 0.0, train, bidirectional, batch_first)
            input, *found = layer(input, start, part, *options)
            for kept, item in zip(last, found, strict=True):
                kept.append(item)
            if index + 1 < num_layers:
                input = torch.nn.functional.dropout(input, dropout, train)
        return input, *[torch.cat(items) for items in last]

    return stacked


def _break(reason: str) -> None:
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type=f"mpcompile: {reason}",
        context=reason,
        explanation="The layer runs eagerly, in fp32.",
        hints=[],
    )
