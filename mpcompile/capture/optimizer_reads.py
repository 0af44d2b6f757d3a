"""What a step reads of its optimizer, before and after the update that is in the same graph.

Dynamo gives what was read in Python from where it lies after the graph has run, and computes with
what lay there before. But an update in the graph may change it: a count in a group, in the state,
in an attribute. So what was read before the update is loaded before the graph runs, and what is
read after it may only be handed on; to compute with it breaks the graph.

torch's own optimizers change no numbers of theirs but the state, so their groups are left alone.

Private torch API, seen in 2.11 to 2.14: ``SideEffects.id_to_variable``; ``ConstDictVariable.items``
and its keys; ``LazyVariableTracker``, ``LazyConstantVariable`` and ``LazyCache``;
``OutputGraph.pregraph_bytecode``, ``new_var`` and ``should_exit``; ``PyCodegen.store``;
``SyntheticLocalSource``; ``UnknownVariable``.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpcompile.capture.dynamo_handlers import current_tx
from mpcompile.runtime.tracing import step_code

REASON = "what an update changes is read after it"
_OF_TORCH = ("_opt_called", "_zero_grad_profile_name", "_mpcompile_updates")
"""Attributes that a step never changes, whoever wrote it."""
_LEAVES = (int, float, complex, str, tuple, Tensor, type(None))
_NO_STATE = (*_LEAVES, torch.nn.Module, type, types.FunctionType, types.MethodType)
_MISSING = object()

Break = Callable[[str, str], None]


def note_attribute(tx: Any, holder: object, name: str, variable: Any) -> None:
    """Note that ``variable`` is what the step has read of an attribute of ``holder``."""
    _of_trace(tx).attributes.append((holder, name, variable))


def is_changed(tx: Any, holder: object, name: str) -> bool:
    """Whether an update in the graph may have changed the attribute ``name`` of ``holder``.

    Nothing is read of objects that no updated optimizer owns: a read may run the user's code, and
    those that the step makes are still empty.
    """
    found = _of_trace(tx)
    if id(holder) in found.updated and name == "state":
        return True
    if id(holder) not in found.owned or name in _OF_TORCH:
        return False
    return isinstance(getattr(holder, name, _MISSING), _LEAVES)


def is_settled(tx: Any, optimizer: Optimizer) -> bool:
    """Whether nothing that was read after an earlier update of ``optimizer`` may be in use."""
    return id(optimizer) not in _of_trace(tx).read_later


def settle(tx: Any, optimizer: Optimizer, break_graph: Break) -> None:
    """Tell what the step has read of ``optimizer`` so far from what it reads after its update."""
    found = _of_trace(tx)
    found.updated.add(id(optimizer))
    holders = {id(holder): holder for holder in _holders(optimizer)}
    found.owned.update(dict.fromkeys(holders, optimizer))
    for holder, name, variable in found.attributes:
        if id(holder) in holders and isinstance(getattr(holder, name, _MISSING), _LEAVES):
            _load_first(tx, variable)
    known = tx.output.side_effects.id_to_variable
    for identity, holder in holders.items():
        variable = known.get(identity)
        if isinstance(holder, (dict, list)) and variable is not None:
            _tell_apart(tx, optimizer, holder, variable, break_graph)


def note_built(tx: Any, holder: object, variable: Any, break_graph: Break) -> None:
    """Note that the step gets at ``holder``, for the first time perhaps after an update of it."""
    optimizer = _of_trace(tx).owned.get(id(holder))
    if optimizer is not None and isinstance(holder, (dict, list)):
        _tell_apart(tx, optimizer, holder, variable, break_graph)


@dataclass
class _Trace:
    """What is known of the optimizers in one trace; objects by identity.

    Attributes:
        updated: optimizers whose update is in the graph.
        owned: objects that such an update may have changed, and whose it is.
        read_later: optimizers of which something was read after their last update.
        attributes: what was read of attributes.
    """

    updated: set[int] = field(default_factory=set)
    owned: dict[int, Optimizer] = field(default_factory=dict)
    read_later: set[int] = field(default_factory=set)
    attributes: list[tuple[object, str, Any]] = field(default_factory=list)


def _of_trace(tx: Any) -> _Trace:
    found: _Trace = vars(tx.output).setdefault("_mpcompile_reads", _Trace())
    return found


def _holders(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the dicts, lists and objects in which a step of ``optimizer`` may keep something."""
    is_torchs = (step_code(optimizer).__module__ or "").partition(".")[0] == "torch"
    pending: list[Any] = [optimizer.state if is_torchs else optimizer]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _NO_STATE):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            pending += [value for key, value in item.items() if not _is_torchs_part(key)]
        elif isinstance(item, (list, collections.deque)):
            pending += item
        else:
            pending.append(getattr(item, "__dict__", None))


def _is_torchs_part(key: Any) -> bool:
    """Whether ``key``, of an optimizer or a group, holds what no step changes."""
    return key == "params" or (isinstance(key, str) and key.startswith(("_optimizer_", *_OF_TORCH)))


def _tell_apart(
    tx: Any, optimizer: Optimizer, holder: Any, variable: Any, break_graph: Break
) -> None:
    """Have the dict or list ``variable`` give from now on what the update leaves in ``holder``."""
    variable = vars(variable.unwrap()).get("_base_vt") or variable.unwrap()
    items = vars(variable).get("items")
    refuse = functools.partial(_refuse, tx, break_graph)
    if isinstance(items, list) and holder is not optimizer.param_groups:
        variable.items = _LaterList(items, refuse)
    if not isinstance(items, dict) or isinstance(items, _LaterDict):
        return
    note = functools.partial(_of_trace(tx).read_later.add, id(optimizer))
    later = variable.items = _LaterDict(items, refuse, note)
    for key, value in items.items():
        name = key.vt.as_python_constant() if key.vt.is_python_constant() else None
        if isinstance(holder.get(name, _MISSING), _LEAVES) and value.source is not None:
            later.unread.add(key)
            later[key] = _unread(holder[name], value.source, break_graph)
            _load_first(tx, value)


def _refuse(tx: Any, break_graph: Break) -> None:
    """Break the graph, unless it ends anyway."""
    if not tx.output.should_exit:
        break_graph(REASON, "what an optimizer holds")


class _Refusing:
    """What a container after an update does where all of it is looked at."""

    _refuse: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        self._refuse()
        return super().__iter__()  # type: ignore[misc,no-any-return]  # a container's

    def __len__(self) -> int:
        self._refuse()
        return super().__len__()  # type: ignore[misc,no-any-return]


class _LaterDict(_Refusing, dict[Any, Any]):
    """The items of a dict after an update that may have added to them."""

    def __init__(
        self, items: dict[Any, Any], refuse: Callable[[], None], note: Callable[[], None]
    ) -> None:
        super().__init__(items)
        self.unread: set[Any] = set()
        self._refuse, self._note = refuse, note

    def __getitem__(self, key: Any) -> Any:
        if key in self.unread:
            self._note()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        if not super().__contains__(key):
            self._refuse()
        return super().__contains__(key)

    def keys(self) -> Any:
        self._refuse()
        return super().keys()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def items(self) -> Any:
        self._refuse()
        return super().items()


class _LaterList(_Refusing, list[Any]):
    """The items of a list after an update that may have changed it."""

    def __init__(self, items: list[Any], refuse: Callable[[], None]) -> None:
        super().__init__(items)
        self._refuse = refuse

    def __getitem__(self, position: Any) -> Any:
        self._refuse()
        return super().__getitem__(position)


def is_unread(variable: Any) -> bool:
    """Whether ``variable`` stands for what an update leaves, and can only be handed on."""
    return isinstance(vars(variable).get("_cache"), _classes().unread)


def _unread(value: Any, source: Any, break_graph: Break) -> Any:
    """Return a variable that can be handed on; to compute with it breaks the graph."""
    classes = _classes()
    is_constant = type(value) in classes.lazy_constant.supported_types
    cache = classes.unread(value, source)
    cache.break_graph = break_graph
    return (classes.lazy_constant if is_constant else classes.lazy)(cache, source=source)


def _load_first(tx: Any, variable: Any) -> None:
    """Have ``variable`` give what lies at its source before the graph runs."""
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.variables.lists import TupleVariable

    classes = _classes()
    if variable.source is None or isinstance(variable.source, classes.local):
        return
    name = tx.output.new_var()
    load = PyCodegen(tx.output.root_tx)
    load(variable.source)
    load.store(name)
    tx.output.pregraph_bytecode.extend(load.get_instructions())
    source = classes.local(name)
    object.__setattr__(source, "guarded", variable.source)
    is_lazy = not variable.is_realized()
    if is_lazy and variable.peek_type() is not tuple:
        variable._cache.__class__ = classes.first
        variable._cache.local = source
    else:
        inner = variable.realize()
        inner.source = source
        for item in inner.items if isinstance(inner, TupleVariable) else ():
            _load_first(tx, item)
    variable.source = source


@functools.cache
def _classes() -> Any:
    """Return subclasses of Dynamo's, which is loaded by whoever asks."""
    from torch._dynamo.source import SyntheticLocalSource
    from torch._dynamo.variables.lazy import LazyCache, LazyConstantVariable, LazyVariableTracker
    from torch._dynamo.variables.misc import DeletedVariable, UnknownVariable

    class Local(SyntheticLocalSource):
        """A variable of the generated code; a guard is on what it was loaded from."""

        def make_guard(self, fn: Any) -> Any:
            return self.guarded.make_guard(fn)  # type: ignore[attr-defined]

    class First(LazyCache):
        """Of what was read before the update."""

        local: Any

        def realize(self) -> None:
            super().realize()
            assert self.vt is not None, "it was just made"
            self.vt.source = self.local

    class Unread(LazyCache):
        """Of what was read after it. The end of a graph hands on what Python is to see."""

        break_graph: Break

        def realize(self) -> None:
            if not current_tx().output.should_exit:
                self.break_graph(REASON, str(self.source))
            self.vt = UnknownVariable(source=self.source)

    def lazy_isinstance(self: Any, cls: Any) -> bool:
        # Dynamo's dicts ask for one class of what they look up, which would be reading it.
        return cls is not DeletedVariable and super(type(self), self).lazy_isinstance(cls)

    members = {"lazy_isinstance": lazy_isinstance}
    return types.SimpleNamespace(
        local=Local,
        first=First,
        unread=Unread,
        lazy=type("Lazy", (LazyVariableTracker,), members),
        lazy_constant=type("LazyConstant", (LazyConstantVariable,), members),
    )
