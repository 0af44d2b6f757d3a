"""What a step can get at: the walk from a function to everything that it may change.

A step is a function over a model and an optimizer that it finds in its closure, its globals, its
``self`` or its arguments. From there the walk follows functions, containers, attributes, and what
the user's classes and modules hold as data.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_MAX_OBJECTS = 100_000  # a walk that gets this far has left the step and is in the interpreter
_OPAQUE = (types.ModuleType, str, bytes, int, float, bool, complex, type(None))
_NO_DATA = (types.FunctionType, types.ModuleType, classmethod, staticmethod, property, type)


def reach(*roots: object) -> Iterator[object]:
    """Yield everything that a step can get at from ``roots``, each thing once."""
    seen: set[int] = set()
    pending: list[object] = list(roots)
    while pending and len(seen) < _MAX_OBJECTS:
        item = pending.pop()
        if id(item) in seen or _is_opaque(item):
            continue
        seen.add(id(item))
        yield item
        pending.extend(_children(item))


def _is_opaque(item: object) -> bool:
    return isinstance(item, _OPAQUE) or (isinstance(item, type) and not _is_users(item.__module__))


def _children(item: object) -> Iterator[object]:
    if isinstance(item, Tensor):
        yield item.grad if item.is_leaf else None
    elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        yield from item
    elif isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, (functools.partial, types.MethodType, types.FunctionType)):
        yield from _children_of_callable(item)
    elif isinstance(item, type):
        yield from class_data(item).values()
        yield from item.__bases__
    elif not _is_of_torch(item):
        yield getattr(item, "__dict__", None)
        yield from (value for _, value in slots(item))
    if not isinstance(item, type):
        yield type(item)


def _is_of_torch(item: object) -> bool:
    """Torch's machinery and ours, models and optimizers aside, is not the step's state."""
    if isinstance(item, (torch.nn.Module, Optimizer)):
        return False
    module = type(item).__module__
    return _is_machinery(module) and not module.startswith(("torch.optim", "torch.nn"))


def _is_machinery(module: str | None) -> bool:
    """Whether what ``module`` holds is torch's or ours, and remembers nothing of the step."""
    return (module or "").partition(".")[0] in ("torch", "mpcompile")


def _is_users(module: str | None) -> bool:
    """Whether ``module`` is not torch's, ours or Python's."""
    root = (module or "").partition(".")[0]
    return not _is_machinery(root) and (root == "__main__" or root not in sys.stdlib_module_names)


def _children_of_callable(
    item: functools.partial[Any] | types.MethodType | types.FunctionType,
) -> Iterator[object]:
    if isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif not _is_machinery(item.__module__):
        yield from _children_of_function(item)


def _children_of_function(function: types.FunctionType) -> Iterator[object]:
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    for cell in function.__closure__ or ():
        yield cell_value(cell)
    for names, name in variables(function):
        yield names[name]


def cell_value(cell: types.CellType) -> object:
    """Return what a variable of a closure holds; None if it was not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def variables(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the global variables that ``function`` names, and those of the user's modules.

    Each as the dict that holds it, and its key.
    """
    names = set(_global_names(function.__code__))
    for name in names & function.__globals__.keys():
        yield function.__globals__, name
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and _is_users(value.__name__):
            for inner in names & vars(value).keys():
                yield vars(value), inner


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def class_data(cls: type) -> dict[str, Any]:
    """Return the attributes of ``cls`` itself that hold data, not code."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__")
        and not isinstance(value, _NO_DATA)
        and not hasattr(type(value), "__get__")
    }


def slots(item: object) -> Iterator[tuple[Any, object]]:
    """Yield each slot of an object of a user's class that has a value, as descriptor and value.

    A class that is written in C has members too, which it alone may set.
    """
    for cls in type(item).__mro__ if _is_users(type(item).__module__) else ():
        is_python = _is_users(cls.__module__) and "__slots__" in vars(cls)
        for member in vars(cls).values() if is_python else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member, member.__get__(item)
                except AttributeError:  # not assigned yet
                    continue
