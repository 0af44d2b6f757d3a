"""Dynamo's variable trackers: how a step is traced whole where stock Dynamo breaks or drops it.

Everything here is installed once and does what stock Dynamo does, except while a step of ours is
traced whole in the same thread. What differs then:

- an optimizer is a plain object: stock Dynamo makes parameters static once ``param_groups`` is
  read, after which ``backward()`` finds no leaf and is silently left out;
- ``backward()`` breaks the graph, instead of doing nothing, where it finds no leaf; it does, and
  so does ``autograd.grad``, where a leaf has hooks, which a traced one would not call;
- a value that is returned although backward has consumed its graph is detached.

Private torch API, seen in 2.11 to 2.14: ``trace_rules._allowed_callable_ids``;
``TorchInGraphFunctionVariable._get_handlers``;
``TensorVariable._collect_backward_inputs`` and ``_method_register_hook``;
``builder.OptimizerVariable`` and ``OptimizerSource``;
``OutputGraph._validate_outputs_safe_for_autograd_nodes``; ``SideEffects.id_to_variable`` and
``has_pending_mutation_of_attr``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpcompile.capture import dropped_grads, dynamo_ddp, hooks, optimizer_reads
from mpcompile.capture.dynamo_handlers import (
    WholeTrace,
    break_graph,
    current_tx,
    handle,
    real_tensor,
    tensors_in,
)
from mpcompile.runtime import stand_ins

Finder = Callable[[], WholeTrace | None]
_find_trace: Finder = lambda: None  # noqa: E731  # replaced by install
_is_left_to_regions: Callable[[], bool] = lambda: False  # noqa: E731  # replaced by install


def install(find_trace: Finder, is_left_to_regions: Callable[[], bool]) -> None:
    """Install everything.

    Args:
        find_trace: returns whose step is being traced whole, or None.
        is_left_to_regions: whether a step of ours is traced that was found not to be one graph.
    """
    global _find_trace, _is_left_to_regions
    _find_trace = find_trace
    _is_left_to_regions = is_left_to_regions
    _install_optimizers()
    _install_backward()


def _install_optimizers() -> None:
    from torch._dynamo.variables import builder
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    # Not in a subclass: Dynamo tracks writes to objects whose variable is of this very type.
    for lookup in _LOOKUPS:
        if lookup in vars(UserDefinedObjectVariable):
            stock_lookup = getattr(UserDefinedObjectVariable, lookup)
            setattr(UserDefinedObjectVariable, lookup, _refusing_changed(stock_lookup))
    stock_source: Any = builder.OptimizerSource
    stock_variable: Any = builder.OptimizerVariable

    def optimizer_source(base: Any) -> Any:
        return stock_source(base) if _find_trace() is None else base

    def optimizer_variable(value: Any, **kwargs: Any) -> Any:
        if _find_trace() is None:
            return stock_variable(value, **kwargs)
        kwargs.pop("mutation_type", None)  # set by those that have one for every such object
        _enter_scheduled_step(value)
        return UserDefinedObjectVariable(value, **kwargs)

    build: Any = builder.VariableBuilder.__call__

    def build_variable(self: Any, value: Any) -> Any:
        found = build(self, value)
        if _find_trace() is not None:
            optimizer_reads.note_built(self.tx, value, found, _break)
        return found

    builder.VariableBuilder.__call__ = build_variable  # type: ignore[method-assign]
    builder.OptimizerSource = optimizer_source  # type: ignore[misc,assignment]
    builder.OptimizerVariable = optimizer_variable  # type: ignore[misc,assignment]


_LOOKUPS = ("var_getattr", "tp_getattro_impl")
"""How variables look up attributes: until torch 2.13, and since 2.14."""


def _refusing_changed(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """Break the graph where it reads what an update in it changes: Dynamo would see the old."""

    def read(self: Any, tx: Any, name: Any) -> Any:
        if optimizer_reads.is_changed(tx, self.value, name):
            _break(optimizer_reads.REASON, f"{type(self.value).__name__}.{name}")
        found = lookup(self, tx, name)
        if _find_trace() is not None:
            optimizer_reads.note_attribute(tx, self.value, name, found)
        return found

    return read


def _enter_scheduled_step(optimizer: torch.optim.Optimizer) -> None:
    """Have Dynamo go through the wrapper that a learning-rate scheduler puts around ``step``.

    It notes that ``step`` was called and calls it; its file is one that Dynamo never enters.
    """
    from torch._dynamo import trace_rules

    wrapper = vars(optimizer).get("step")
    if not getattr(wrapper, "_wrapped_by_lr_sched", False) or wrapper in _scheduled:
        return
    _scheduled.add(wrapper)
    handle(wrapper, functools.partial(_trace_scheduled, weakref.ref(wrapper)))
    weakref.finalize(wrapper, trace_rules._allowed_callable_ids.remove, id(wrapper))


_scheduled: weakref.WeakSet[Any] = weakref.WeakSet()


def _trace_scheduled(
    reference: weakref.ref[Any], self: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable

    wrapper = reference()
    assert wrapper is not None, "Dynamo holds the function that it traces"
    if _find_trace() is None or self.source is None:
        reason = "the wrapper of a learning-rate scheduler"
        skipped = SkipFunctionVariable(wrapper, reason=reason, source=self.source)
        return skipped.call_function(tx, list(args), kwargs)
    optimizer = VariableTracker.build(tx, _owner(wrapper), self.source.base)
    note = [optimizer, *(VariableTracker.build(tx, item) for item in ("_opt_called", True))]
    VariableTracker.build(tx, setattr).call_function(tx, note, {})
    inner = UserFunctionVariable(wrapper.__wrapped__)
    return inner.call_function(tx, [optimizer, *args], kwargs)


def _owner(wrapper: Any) -> Any:
    """Return the optimizer that ``wrapper`` belongs to."""
    at = wrapper.__code__.co_freevars.index("opt_ref")
    return wrapper.__closure__[at].cell_contents()


def _install_backward() -> None:
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    collect: Any = TensorVariable._collect_backward_inputs
    register_hook: Any = TensorVariable._method_register_hook
    validate: Any = OutputGraph._validate_outputs_safe_for_autograd_nodes

    def collect_backward_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = collect(self, *args, **kwargs)
        if _is_left_to_regions():
            _break("this step is compiled in regions, which end at backward()", "backward")
        if _find_trace() is not None:
            _check_leaves(found or ())
            dropped_grads.note_backward(current_tx().output, _reals(found or ()))
        return found

    def method_register_hook(self: Any, tx: Any, name: str, hook: Any) -> Any:
        if _find_trace() is not None and self.source:
            _break("a hook is registered on a parameter or an input", f"Tensor.{name}")
        return register_hook(self, tx, name, hook)

    def validate_outputs(self: Any, rv: list[Any], tx: Any) -> None:
        if _find_trace() is not None:
            _detach_consumed(self, rv, tx)
        validate(self, rv, tx)

    for lookup in _LOOKUPS:
        if lookup in vars(TensorVariable):
            setattr(TensorVariable, lookup, _reading_pending(getattr(TensorVariable, lookup)))
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers[torch.autograd.grad] = _checking_inputs(handlers[torch.autograd.grad])
    accumulate = torch.ops.inductor.accumulate_grad_.default
    handlers[accumulate] = _storing_sums(handlers[accumulate])
    TensorVariable._collect_backward_inputs = collect_backward_inputs  # type: ignore[method-assign]
    TensorVariable._method_register_hook = method_register_hook  # type: ignore[method-assign]
    OutputGraph._validate_outputs_safe_for_autograd_nodes = validate_outputs  # type: ignore[method-assign]


def _reading_pending(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attribute lookup that reads a gradient written in this graph as it stands.

    The stock one gives it the source of the parameter's old gradient. If it is None, Dynamo's one
    None for the whole process gets that source, and later graphs read it from there.
    """

    def read(self: Any, tx: Any, name: Any) -> Any:
        effects = tx.output.side_effects
        if name == "grad" and effects.has_pending_mutation_of_attr(self, "grad"):
            return effects.load_attr(self, "grad")
        return lookup(self, tx, name)

    return read


def _storing_sums(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler after which the graph has written ``.grad``, also where it has added to it.

    That of torch 2.11 stores nothing then, and updates would not know that the gradient is theirs.
    """

    def traced(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.variables.base import VariableTracker

        done, effects = accumulate(self, tx, *args, **kwargs), tx.output.side_effects
        param = args[0].realize()
        if _find_trace() is None or effects.has_pending_mutation_of_attr(param, "grad"):
            return done
        name = VariableTracker.build(tx, "grad")
        grad = VariableTracker.build(tx, getattr).call_function(tx, [param, name], {})
        if not grad.is_python_constant():
            effects.store_attr(param, "grad", grad.clone(source=None, mutation_type=None))
        return done

    return traced


def _check_leaves(leaves: Sequence[Any]) -> None:
    """Break the graph at ``backward()`` unless it can be traced truly."""
    tensors = _reals(leaves)
    if not leaves:
        _break("backward() meets no parameter in this graph; they lie behind a break", "backward")
    if any(map(hooks.has_hooks, tensors)):
        hooks.forget(tensors)
        _break("a parameter has gradient hooks, which a traced backward would not call", "backward")
    hooks.keep_unhooked(tensors)
    dynamo_ddp.end_backward()
    _guard_epoch()


def _checking_inputs(grad: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of ``autograd.grad`` that breaks the graph where an input has hooks."""

    def traced(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _find_trace() is not None or _is_left_to_regions():
            inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
            _check_own_hooks([] if inputs is None else [inputs])
        return grad(self, tx, *args, **kwargs)

    return traced


def _check_own_hooks(variables: Sequence[Any]) -> None:
    found = _reals(tensors_in(variables))
    if any(map(hooks.has_own_hooks, found)):
        hooks.forget(found)
        _break("a parameter has gradient hooks, which a traced grad would not call", "grad")
    if found:
        hooks.keep_unhooked(found)
        _guard_epoch()


def _guard_epoch() -> None:
    """Have the graph that is being traced expire with the others."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    tx = current_tx()
    epoch: Any = stand_ins.current_epoch
    read = UserFunctionVariable(epoch).call_function(tx, [], {})
    read.as_python_constant()  # Dynamo guards on what is looked at


def _reals(variables: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for variable in variables if (tensor := real_tensor(variable)) is not None]


def _detach_consumed(graph: Any, outputs: list[Any], tx: Any) -> None:
    """Detach outputs whose graph a traced backward has used up; eager cannot go back either."""
    from torch._dynamo.output_graph import collect_reachable_grad_fns
    from torch._dynamo.variables.tensor import TensorVariable

    consumed = graph.autograd_grad_consumed_grad_fns
    for index, variable in enumerate(outputs if consumed else ()):
        if not isinstance(variable, TensorVariable) or not variable.requires_grad:
            continue
        fake: Any = variable.as_proxy().node.meta.get("example_value")
        if getattr(fake, "grad_fn", None) is None:
            continue
        if collect_reachable_grad_fns([(fake, None)]) & consumed:
            outputs[index] = variable.call_method(tx, "detach", [], {})


def _break(reason: str, context: str) -> None:
    """Break the graph, and have the report tell why."""
    break_graph(reason, context, _find_trace())
