"""Updates and gradient clipping in a step that is traced whole: one op each (``runtime.ops``).

Private torch API, seen in 2.11 to 2.14: ``SideEffects.id_to_variable``, ``is_modified`` and
``has_pending_mutation_of_attr``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mpcompile.capture import dropped_grads, optimizer_reads
from mpcompile.capture.dynamo_handlers import WholeTrace, break_graph, handle
from mpcompile.runtime import stand_ins
from mpcompile.runtime.dispatch import runs_hooks_again
from mpcompile.runtime.structure import params_of
from mpcompile.runtime.update import AMP_NAMES, HOOKS_AGAIN


class UpdateTrace(WholeTrace, Protocol):
    """What tracing an update asks besides."""

    def handle_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the handle of the optimizer's update."""

    def keep_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Rely on the list of parameters of ``optimizer`` until the graph expires."""


Finder = Callable[[], UpdateTrace | None]
_find_trace: Finder = lambda: None  # noqa: E731  # replaced by install


def install(find_trace: Finder) -> None:
    """Have ``find_trace`` say whose step is being traced whole, or None."""
    global _find_trace
    _find_trace = find_trace
    handle(stand_ins.update_in_graph, _trace_update)
    handle(stand_ins.is_own_step, _trace_is_own_step)
    clips = {
        torch.nn.utils.clip_grad_norm_: stand_ins.clip_grad_norm,
        torch.nn.utils.clip_grad_value_: stand_ins.clip_grad_value,
    }
    for original, stand_in in clips.items():
        handle(original, functools.partial(_trace_clip, original, stand_in))


def _trace_clip(original: Any, stand_in: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Inline the stand-in, or ``original`` where it does more than the stand-in can."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    kwargs = dict(kwargs)
    error_if_nonfinite = kwargs.get("error_if_nonfinite", args[3] if len(args) > 3 else None)
    plain = error_if_nonfinite is None or not error_if_nonfinite.as_python_constant()
    if _find_trace() is None or not plain:
        return UserFunctionVariable(original, source=self.source).call_function(
            tx, list(args), kwargs
        )
    for name in ("error_if_nonfinite", "foreach"):
        kwargs.pop(name, None)
    return UserFunctionVariable(stand_in).call_function(tx, list(args[:3]), kwargs)


def _trace_is_own_step(self: Any, tx: Any, optimizer: Any, code: Any) -> Any:
    """Answer for the class of the optimizer, which is guarded anyway."""
    from torch._dynamo.variables.constant import ConstantVariable

    value = optimizer.realize().value
    return ConstantVariable.create(stand_ins.is_own_step(value, code.as_python_constant()))


def _trace_update(self: Any, tx: Any, optimizer: Any, epoch: Any) -> Any:
    """Put ``mpcompile::update`` into the graph if backward is in it too, and say so."""
    from torch._dynamo.variables.constant import ConstantVariable

    trace = _find_trace()
    epoch.as_python_constant()
    done = trace is not None and _emit_update(tx, optimizer.realize().value, trace)
    return ConstantVariable.create(done)


def _emit_update(tx: Any, optimizer: torch.optim.Optimizer, trace: UpdateTrace) -> bool:
    """Emit the update with those gradients that the graph has written.

    Declines if there are none, and if the step has changed what the optimizer will read: Python
    sees such changes after the graph only.
    """
    if not optimizer_reads.is_settled(tx, optimizer):
        trace.note_refusal(optimizer_reads.REASON)
        return False
    if _is_changed(tx.output.side_effects, optimizer):
        return False
    params = params_of(optimizer)
    given = [_is_written(tx, param) for param in params]
    grads = [
        _grad_proxy(tx, p) if written else None for p, written in zip(params, given, strict=True)
    ]
    updated = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
    if not updated:
        return False
    if runs_hooks_again(optimizer):
        trace.note_refusal(HOOKS_AGAIN)
        return False
    for param in updated:
        dropped_grads.note_update(tx.output, param)
    trace.keep_parameters(optimizer)
    optimizer_reads.settle(tx, optimizer, functools.partial(break_graph, trace=trace))
    tx.output.create_proxy(
        "call_function",
        torch.ops.mpcompile.update.default,
        (trace.handle_of(optimizer), grads, given),
        {},
    )
    return True


def _is_written(tx: Any, param: torch.Tensor) -> bool:
    """Whether the graph has written to ``param.grad``."""
    effects = tx.output.side_effects
    variable = effects.id_to_variable.get(id(param))
    return variable is not None and bool(effects.has_pending_mutation_of_attr(variable, "grad"))


def _grad_proxy(tx: Any, param: torch.Tensor) -> Any:
    """Return the value that the graph has written to ``param.grad``, or None for None."""
    from torch._dynamo.variables.base import VariableTracker

    args = [tx.output.side_effects.id_to_variable[id(param)], VariableTracker.build(tx, "grad")]
    grad = VariableTracker.build(tx, getattr).call_function(tx, args, {})
    return None if grad.is_python_constant() else grad.as_proxy()


def _is_changed(effects: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the traced code has written to the groups or the state of ``optimizer``."""
    containers: list[object] = [optimizer.param_groups, optimizer.state]
    for group in optimizer.param_groups:
        containers += [group, group["params"], group.get("betas")]
    known = [effects.id_to_variable.get(id(item)) for item in containers]
    if any(item is not None and effects.is_modified(item) for item in known):
        return True
    owner = effects.id_to_variable.get(id(optimizer))
    names = ("param_groups", "state", "defaults", *AMP_NAMES)
    return owner is not None and any(
        effects.has_pending_mutation_of_attr(owner, name) for name in names
    )
