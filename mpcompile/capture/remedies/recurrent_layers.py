"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op each, in any step of ours.

Dynamo refuses them; told to trace them, it has all their time steps in the graph, which Inductor
does not finish compiling. Packed sequences, and dropout between layers, whose random numbers a
backward that runs the layer again could not repeat, break the graph at the layer.

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
    if options["train"] and options["dropout"] and options["num_layers"] > 1:
        _break(f"{kind} with dropout between its layers")
    layer: Any = _lstm if kind == "lstm" else _of_kind(kind)
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


def _break(reason: str) -> None:
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type=f"mpcompile: {reason}",
        context=reason,
        explanation="The layer runs eagerly, in fp32.",
        hints=[],
    )
