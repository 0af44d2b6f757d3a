"""``losses.append(loss.detach())``: run after the graph instead of guarding the list's length.

Dynamo takes a list as it stands, so one that grows with each call would compile the step anew at
each call. Where a step does nothing to a list of the user's but append to it, the list is not
looked at: the appends run after the graph, in order. A step that does anything else with the list,
by whatever name, is traced once more, with Dynamo's own lists.

Private torch API, seen in 2.11 to 2.14: ``InstructionTranslatorBase._load_attr``, ``stack`` and
``debug_locals``; ``GetAttrVariable.call_function``; ``VariableBuilder.__call__``;
``LazyVariableTracker.is_realized``, ``peek_value`` and ``lazy_isinstance``; ``DebuggingVariable``;
``SideEffects.__contains__``; ``OutputGraph.tracers``; ``CompileContext.get``.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

from mpcompile.capture import dynamo_api, optimizer_reads
from mpcompile.runtime.stand_ins import is_traced_whole

_GROWING: tuple[Any, ...] = (list, collections.deque)


def install() -> None:
    """Defer appends in steps that are traced whole."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.misc import DeletedVariable, GetAttrVariable

    load: Any = InstructionTranslatorBase._load_attr
    call: Any = GetAttrVariable.call_function
    build: Any = VariableBuilder.__call__
    is_instance: Any = LazyVariableTracker.lazy_isinstance

    def load_attr(self: Any, attr: Any) -> None:
        if attr == "append" and is_traced_whole() and _may_grow(self, self.stack[-1]):
            self.push(GetAttrVariable(self.pop(), attr))
        else:
            load(self, attr)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_append = self.name == "append" and len(args) == 1 and not kwargs
        if is_append and is_traced_whole() and _is_deferrable(self.obj, tx, args[0]):
            return _defer(self.obj, tx, args[0])
        return call(self, tx, args, kwargs)

    def build_variable(self: Any, value: Any) -> Any:
        if type(value) in _GROWING:
            _note_read(self.tx, value)
        return build(self, value)

    def lazy_isinstance(self: Any, cls: Any) -> bool:
        # Dynamo's dicts ask this of what they look up, which would be reading it.
        if cls is DeletedVariable and is_traced_whole() and _is_unread_list(self):
            return False
        return bool(is_instance(self, cls))

    InstructionTranslatorBase._load_attr = load_attr  # type: ignore[method-assign]
    GetAttrVariable.call_function = call_function  # type: ignore[method-assign]
    VariableBuilder.__call__ = build_variable  # type: ignore[method-assign]
    LazyVariableTracker.lazy_isinstance = lazy_isinstance  # type: ignore[method-assign]


def _may_grow(tx: Any, variable: Any) -> bool:
    """Whether ``variable`` is a list of the user's that the trace has not looked at so far."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if type(variable) is not LazyVariableTracker or not _is_unread_list(variable):
        return False
    is_known = variable.peek_value() in tx.output.side_effects  # by another name
    return not is_known and variable.source not in _sources_read()


def _is_unread_list(lazy: Any) -> bool:
    return not lazy.is_realized() and type(lazy.peek_value()) in _GROWING


def _sources_read() -> set[Any]:
    """Return the sources of lists that the function appends to but does other things with too.

    They are kept while it is traced, as often as it takes.
    """
    context = torch._guards.CompileContext.get()
    found: set[Any] = vars(context).setdefault("_mpcompile_read", set())
    return found


def _is_deferrable(growing: Any, tx: Any, item: Any) -> bool:
    """Whether the append can wait; not inside an operator, which may run its body again."""
    nests = torch._dynamo.config.nested_graph_breaks  # which lose what waits
    if nests or len(tx.output.tracers) > 1:
        return False
    # The item first: it may be the list, or hold it.
    return _is_plain(item) and _may_grow(tx, growing)


def _is_plain(variable: Any) -> bool:
    """Whether the generated code can make the item: no object of a class of the user's.

    Dynamo would drop such an object, as nothing that it knows of refers to it.
    """
    from torch._dynamo.variables import ConstDictVariable, ListVariable, TupleVariable

    if optimizer_reads.is_unread(variable):
        return True
    item = variable.realize()
    if type(item) in (ListVariable, TupleVariable) and not item.source:
        return all(map(_is_plain, item.items))
    if type(item) is ConstDictVariable and not item.source:
        return all(map(_is_plain, item.items.values()))
    return bool(item.is_tensor() or item.is_python_constant() or item.is_symnode_like())


def _defer(growing: Any, tx: Any, item: Any) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import DebuggingVariable

    source, value = growing.source, growing.peek_value()
    install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
    _, sources = _deferred(tx).setdefault(id(value), (value, set()))
    sources.add(source)
    append = DebuggingVariable(value.append, source=AttrSource(source, "append"))
    tx.output.root_tx.debug_locals.append((append, [item]))
    return ConstantVariable.create(None)


def _deferred(tx: Any) -> dict[int, tuple[Any, set[Any]]]:
    """Return the lists that wait for appends, and where they were found, by identity."""
    found: dict[int, tuple[Any, set[Any]]] = vars(tx.output).setdefault("_mpcompile_growing", {})
    return found


def _note_read(tx: Any, value: Any) -> None:
    """Trace the step anew if it looks at a list that appends wait for."""
    if id(value) in _deferred(tx):
        _, sources = _deferred(tx)[id(value)]
        _sources_read().update(sources)
        dynamo_api.restart_tracing("the step looks at a list that it appends to")
