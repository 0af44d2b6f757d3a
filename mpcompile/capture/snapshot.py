"""Run a step and leave no trace: remember what it can reach, put it back afterwards.

A step is a function over a model and an optimizer that it finds in its closure, its globals, its
``self`` or its arguments. From there the walk follows functions, containers and attributes. What it
meets is remembered by value (tensors, random state) or one level deep (lists, dicts, attributes).
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpcompile.runtime.late_state import settle

Undo = Callable[[], None]

_MAX_OBJECTS = 100_000  # a walk that gets this far has left the step and is in the interpreter
_ITERATORS: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_OPAQUE = (types.ModuleType, type, str, bytes, int, float, bool, complex, type(None))


@contextmanager
def restored(*roots: object) -> Iterator[None]:
    """Put everything that ``roots`` reach back as it was when the block is left.

    Tensors get their values back in place; gradients, optimizer state, attributes, list and dict
    entries and closure variables that are new are dropped. Files and sockets are not.
    """
    put_back = remember(*roots)
    try:
        yield
    finally:
        put_back()


def remember(*roots: object) -> Undo:
    """Return a function that puts everything that ``roots`` reach back as it is now."""
    undo: list[Undo] = [_remember_random()]
    found = list(reach(*roots))
    for item in found:
        if isinstance(item, Optimizer):
            settle(item)
    for item in found:
        undo.extend(_remember(item))

    def put_back() -> None:
        for part in undo:
            part()

    return put_back


def reach(*roots: object) -> Iterator[object]:
    """Yield everything that a step can get at from ``roots``, each thing once."""
    yield from _walk(roots)


def _walk(roots: tuple[object, ...]) -> Iterator[object]:
    seen: set[int] = set()
    pending: list[object] = list(roots)
    while pending and len(seen) < _MAX_OBJECTS:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        yield item
        pending.extend(_children(item))


def _children(item: object) -> Iterator[object]:
    if isinstance(item, Tensor):
        yield item.grad if item.is_leaf else None
    elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        yield from item
    elif isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        if not _is_machinery(item.__module__):
            yield from _children_of_function(item)
    elif not _is_of_torch(item):
        yield getattr(item, "__dict__", None)


def _is_of_torch(item: object) -> bool:
    """Torch's machinery and ours, models and optimizers aside, is not the step's state."""
    if isinstance(item, (torch.nn.Module, Optimizer)):
        return False
    module = type(item).__module__
    return _is_machinery(module) and not module.startswith(("torch.optim", "torch.nn"))


def _is_machinery(module: str | None) -> bool:
    """Whether what ``module`` holds is torch's or ours, and remembers nothing of the step."""
    return (module or "").partition(".")[0] in ("torch", "mpcompile")


def _children_of_function(function: types.FunctionType) -> Iterator[object]:
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        yield _cell_value(cell)
    for name in _global_names(function.__code__):
        yield function.__globals__.get(name)
    yield getattr(function, "__wrapped__", None)


def _cell_value(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _remember(item: object) -> Iterator[Undo]:
    if isinstance(item, Tensor):
        yield _remember_tensor(item)
    elif isinstance(item, list):
        yield functools.partial(_refill_list, item, list(item))
    elif isinstance(item, collections.deque):
        yield functools.partial(_refill_deque, item, list(item))
    elif isinstance(item, (dict, set)):
        yield functools.partial(_refill, item, item.copy())
    elif isinstance(item, _ITERATORS):
        iterator: Any = item
        yield functools.partial(iterator.__setstate__, iterator.__reduce__()[-1])
    elif isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            yield functools.partial(_refill_cell, cell, _cell_value(cell))
        for name in set(_global_names(item.__code__)) & item.__globals__.keys():
            yield functools.partial(item.__globals__.__setitem__, name, item.__globals__[name])


def _remember_tensor(tensor: Tensor) -> Undo:
    value, grad = tensor.detach().clone(), tensor.grad if tensor.is_leaf else None

    def put_back() -> None:
        with torch.no_grad():
            tensor.detach().copy_(value)
        if tensor.is_leaf:
            tensor.grad = grad

    return put_back


def _refill_list(target: list[Any], content: list[Any]) -> None:
    if len(target) != len(content) or any(a is not b for a, b in zip(target, content, strict=True)):
        target[:] = content


def _refill_deque(target: collections.deque[Any], content: list[Any]) -> None:
    target.clear()
    target.extend(content)


def _refill(target: Any, content: Any) -> None:
    target.clear()
    target.update(content)


def _refill_cell(cell: types.CellType, value: object) -> None:
    if _cell_value(cell) is not value:
        cell.cell_contents = value


def _remember_random() -> Undo:
    state = random.getstate()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def put_back() -> None:
        random.setstate(state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if numpy:
            numpy.random.set_state(numpy_state)

    return put_back
