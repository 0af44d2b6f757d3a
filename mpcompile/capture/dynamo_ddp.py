"""DistributedDataParallel in a step that is traced whole: what is traced in place of the wrapper.

A call of the wrapper becomes a call of the module in it, and each gradient that a backward gives to
its parameters is followed by ``mpcompile::average_gradient``. What stock DDP decides from call to
call is followed here: a forward that synchronises arms the module, a backward that reaches an armed
one reduces and disarms it. If Dynamo ends the graph between the two, or a backward reaches a part
of the parameters only, nothing of the trace may be used: ``Traced.problem`` says so.

Private torch API, seen in 2.11 to 2.14: ``UnspecializedNNModuleVariable.call_function`` and its
attribute lookups; ``TorchInGraphFunctionVariable._get_handlers``;
``UserMethodVariable``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from mpcompile.capture.dynamo_handlers import (
    break_graph,
    current_tx,
    handle,
    real_tensor,
    tensors_in,
)
from mpcompile.distributed import ddp_api, traced
from mpcompile.distributed.module import ModuleSync

_LOOKUPS = ("var_getattr", "tp_getattro_impl")
_KEY = "_mpcompile_ddp"


class SyncTrace(Protocol):
    """What tracing asks of the session whose step it is."""

    def module_of(self, ddp: DistributedDataParallel) -> ModuleSync:
        """Return what sends the gradients of ``ddp``."""

    def refusal_of(self, ddp: DistributedDataParallel) -> str:
        """Return why a graph cannot take the place of ``ddp``, or nothing."""


Finder = Callable[[], SyncTrace | None]


@dataclass
class Wrapped:
    """One DDP module in a trace.

    Attributes:
        ddp: the module.
        sync: what sends its gradients.
        names: of the parameters that it reduces, by id.
        syncs: whether backwards reduce at this point of the trace; None: as on the instance.
        is_armed: whether the next backward that reaches it reduces.
        turns: how many backwards have reduced so far.
        reached: the parameters that the backward being traced has reached.
        broadcasts: whether a forward fetches buffers.
        has_forward: whether a forward is in the graph that backward may follow.
    """

    ddp: DistributedDataParallel
    sync: ModuleSync
    names: Mapping[int, str]
    syncs: bool | None = None
    is_armed: bool = False
    turns: int = 0
    reached: set[str] = field(default_factory=set)
    broadcasts: bool = False
    has_forward: bool = False


@dataclass
class Traced:
    """The DDP modules that the graph being traced calls, by id."""

    modules: dict[int, Wrapped] = field(default_factory=dict)
    found: str = ""

    def owner_of(self, param: torch.Tensor) -> Wrapped | None:
        """Return the module that reduces the gradient of ``param``."""
        return next((item for item in self.modules.values() if id(param) in item.names), None)

    def end_backward(self) -> None:
        """Note that the backward that was traced last, if any, is through."""
        for item in self.modules.values():
            if not item.reached:
                continue
            missing = [name for name in item.names.values() if name not in item.reached]
            if missing and not item.ddp.static_graph:
                name = type(item.ddp.module).__name__
                self.found = self.found or f"{missing[0]} of {name} gets no gradient in a backward"
            item.turns += 1
            item.is_armed = False
            item.reached = set()

    def problem(self, is_broken: bool) -> str:
        """Return why the graph that was traced must not be used, or nothing."""
        self.end_backward()
        if self.found:
            return self.found
        for item in self.modules.values():
            name = type(item.ddp.module).__name__
            if is_broken and (item.has_forward or item.broadcasts or item.syncs is not None):
                return f"the graph breaks where DistributedDataParallel({name}) is at work"
            if item.is_armed:
                return f"DistributedDataParallel({name}) is called, its backward is elsewhere"
            if item.turns > 1 and item.sync.keeps_residuals:
                return "error_feedback with several reductions of one parameter in a step"
        return ""


_find_trace: Finder = lambda: None  # noqa: E731  # replaced by install


def traced_in(tx: Any) -> Traced:
    """Return the DDP modules of the graph that ``tx`` is part of."""
    found: Traced = vars(tx.output).setdefault(_KEY, Traced())
    return found


def current() -> Traced:
    """Return the DDP modules of the graph that was just traced."""
    return traced_in(current_tx())


def end_backward() -> None:
    """Note that the backward before is through, as another begins."""
    current().end_backward()


def install(find_trace: Finder) -> None:
    """Install everything; ``find_trace`` returns whose step is being traced whole, or None."""
    global _find_trace
    _find_trace = find_trace
    _install_calls()
    _install_accumulation()
    handle(traced.set_sync, _trace_set_sync)


def _install_calls() -> None:
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    call: Any = UnspecializedNNModuleVariable.call_function

    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.value, DistributedDataParallel) and _find_trace() is not None:
            return _call_wrapped(self, tx, list(args), kwargs)
        return call(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
    for lookup in _LOOKUPS:
        if lookup in vars(UnspecializedNNModuleVariable):
            stock = getattr(UnspecializedNNModuleVariable, lookup)
            setattr(UnspecializedNNModuleVariable, lookup, _finding_no_sync(stock))


def _finding_no_sync(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attribute lookup that gives a ``no_sync`` that can be traced."""

    def find(self: Any, tx: Any, name: Any) -> Any:
        is_ours = name == "no_sync" and isinstance(self.value, DistributedDataParallel)
        if not is_ours or _find_trace() is None:
            return lookup(self, tx, name)
        from torch._dynamo.variables.functions import UserMethodVariable

        return UserMethodVariable(traced.no_sync, self)

    return find


def _wrapped(variable: Any, tx: Any) -> Wrapped:
    """Return what the trace knows of a DDP module; end the graph if it cannot be traced."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    trace, ddp, modules = _find_trace(), variable.value, traced_in(tx).modules
    assert trace is not None
    if id(ddp) in modules:
        return modules[id(ddp)]
    refusal = trace.refusal_of(ddp)
    trained = [item for item in ddp_api.named_parameters(ddp) if item[1].requires_grad]
    names = {id(param): name for name, param in trained}
    if any(not names.keys().isdisjoint(other.names) for other in modules.values()):
        refusal = "a parameter belongs to two of DistributedDataParallel"
    if refusal or not variable.source:
        break_graph(refusal or "the module is made in the step", "DistributedDataParallel")
    install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
    modules[id(ddp)] = Wrapped(ddp, trace.module_of(ddp), names)
    return modules[id(ddp)]


def _syncs(item: Wrapped, variable: Any, tx: Any) -> bool:
    """Return whether backwards of ``variable`` reduce at this point of the trace; guarded."""
    from torch._dynamo.variables.base import VariableTracker

    if item.syncs is None:
        args = [variable, VariableTracker.build(tx, "require_backward_grad_sync")]
        found = VariableTracker.build(tx, getattr).call_function(tx, args, {})
        return bool(found.as_python_constant())
    return item.syncs


def _call_wrapped(variable: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace the module inside a DDP module, and what stock DDP does before it."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.functions import UserFunctionVariable

    traced_in(tx).end_backward()
    item = _wrapped(variable, tx)
    if _are_elsewhere([*args, *kwargs.values()], ddp_api.input_device(item.ddp)):
        break_graph("the wrapper moves inputs to its device", "DistributedDataParallel")
    averages = torch.is_grad_enabled() and _syncs(item, variable, tx)
    item.has_forward |= torch.is_grad_enabled()
    if item.sync.num_ranks > 1:
        item.is_armed |= averages
        if ddp_api.syncs_buffers(item.ddp):
            if not torch.is_grad_enabled():
                break_graph("buffers are broadcast in evaluation", "DistributedDataParallel")
            item.broadcasts = True
            made = [VariableTracker.build(tx, value) for value in (item.sync.handle, averages)]
            fetch: Any = traced.fetch_buffers
            UserFunctionVariable(fetch).call_function(tx, [variable, *made], {})
    inside = VariableTracker.build(tx, "module")
    module = VariableTracker.build(tx, getattr).call_function(tx, [variable, inside], {})
    return module.call_function(tx, args, kwargs)


def _are_elsewhere(inputs: Sequence[Any], device: torch.device | None) -> bool:
    """Whether a tensor among ``inputs``, in containers too, is on another device."""
    if device is None:
        return False
    found = tensors_in([variable.realize() for variable in inputs])
    return any(_place(variable.device) != _place(device) for variable in found)


def _place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def _install_accumulation() -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    op = torch.ops.inductor.accumulate_grad_.default
    handlers[op] = functools.partial(_accumulate, handlers[op])


def _accumulate(stock: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Accumulate a gradient as stock Dynamo does, then average it if it is DDP's."""
    trace = _find_trace()
    variable, new = args[0], args[-1]
    param = real_tensor(variable) if trace is not None else None
    item = None if param is None else traced_in(tx).owner_of(param)
    is_new = item is not None and _grad_is_none(variable, tx)
    result = stock(self, tx, *args, **kwargs)
    if item is not None and item.is_armed and not new.is_python_constant():
        _average(item, item.names[id(param)], variable, tx, is_new)
    return result


def _average(item: Wrapped, name: str, variable: Any, tx: Any, is_new: bool) -> None:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.functions import UserFunctionVariable

    item.reached.add(name)
    function: Any = traced.average_grad if is_new else traced.average_grad_in_place
    made = [VariableTracker.build(tx, value) for value in (item.sync.handle, name, item.turns)]
    UserFunctionVariable(function).call_function(tx, [variable, *made], {})


def _grad_is_none(variable: Any, tx: Any) -> bool:
    from torch._dynamo.variables.base import VariableTracker

    args = [variable, VariableTracker.build(tx, "grad")]
    grad = VariableTracker.build(tx, getattr).call_function(tx, args, {})
    return bool(grad.is_python_constant() and grad.as_python_constant() is None)


def _trace_set_sync(self: Any, tx: Any, module: Any, syncs: Any) -> Any:
    """Note in the trace what ``traced.set_sync`` does to a module."""
    from torch._dynamo.variables.constant import ConstantVariable

    module = module.realize()
    item = _wrapped(module, tx)
    before = _syncs(item, module, tx)
    item.syncs = bool(syncs.as_python_constant())
    return ConstantVariable.create(before)
