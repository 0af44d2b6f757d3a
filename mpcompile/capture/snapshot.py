"""Run a step and leave no trace: remember what it can reach, put it back afterwards.

What the walk of ``reach`` meets is remembered by value (tensors, arrays, random state) or one level
deep (lists, dicts, attributes).
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

from mpcompile.capture.reach import cell_value, class_data, reach, slots, variables
from mpcompile.runtime.late_state import settle

Undo = Callable[[], None]

_ITERATORS: tuple[Any, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


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
            yield functools.partial(_refill_cell, cell, cell_value(cell))
        for names, name in variables(item):
            yield functools.partial(names.__setitem__, name, names[name])
    elif isinstance(item, type):
        yield functools.partial(_refill_class, item, class_data(item))
    else:
        yield from _remember_object(item)


def _remember_object(item: Any) -> Iterator[Undo]:
    numpy = sys.modules.get("numpy")
    if isinstance(item, torch.Generator):
        yield functools.partial(_set_state, item, item.get_state())
    elif isinstance(item, random.Random):
        yield functools.partial(item.setstate, item.getstate())
    elif numpy and isinstance(item, numpy.ndarray):
        yield functools.partial(numpy.copyto, item, item.copy())
    elif numpy and isinstance(item, numpy.random.Generator):
        source, state = item.bit_generator, item.bit_generator.state
        yield functools.partial(setattr, source, "state", state)
    else:
        known = list(slots(item))
        if known:
            yield functools.partial(_refill_slots, item, known)


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
    if cell_value(cell) is not value:
        cell.cell_contents = value


def _refill_class(cls: type, data: dict[str, Any]) -> None:
    now = class_data(cls)
    for name in now.keys() - data.keys():
        type.__delattr__(cls, name)
    for name, value in data.items():
        if name not in now or now[name] is not value:
            type.__setattr__(cls, name, value)


def _refill_slots(item: object, known: list[tuple[Any, object]]) -> None:
    was_set = {id(member) for member, _ in known}
    for member, _ in list(slots(item)):
        if id(member) not in was_set:
            member.__delete__(item)
    for member, value in known:
        member.__set__(item, value)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


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
