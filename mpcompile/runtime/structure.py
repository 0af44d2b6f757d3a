"""What an optimizer's groups and states are made of: numbers, 0-dim tensors, tensors, constants.

Numbers and 0-dim tensors become inputs of the traced step, whatever their values are. Everything
else (flags, names, None) is a constant: a different one means a different trace.
"""

from __future__ import annotations

import copy
import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpcompile.errors import CodegenError

SINGLE_TENSOR = {"foreach": False, "fused": False}
"""Group entries that only choose an implementation; updates are traced as single-tensor."""


def params_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    """Return the parameters of all groups, in order; not to be written to."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        params: list[torch.Tensor] = groups[0]["params"]
        return params
    return [param for group in groups for param in group["params"]]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum))


def number_dtype(value: float) -> str:
    """Return the dtype name of a Python number."""
    return "i64" if isinstance(value, int) else "f64"


@dataclass(frozen=True)
class GroupStructure:
    """A group without its values. Paths are ``key`` or ``key.position`` in a tuple or list."""

    numbers: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, torch.dtype], ...]
    constants: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class StateEntry:
    """One entry of a parameter's state. ``kind`` is number, scalar, tensor, other or constant.

    ``scalar`` is a 0-dim tensor, ``tensor`` has the parameter's shape, ``other`` another one.
    """

    key: str
    kind: str
    dtype: object
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParamStructure:
    """What tells two parameters' updates apart; ``shape`` is empty unless the code reads it."""

    group: GroupStructure
    dtype: torch.dtype
    ndim: int
    state: tuple[StateEntry, ...]
    shape: tuple[int, ...] = ()


def flat_items(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of ``entries``, entering tuples and lists of numbers and tensors."""
    for key, value in entries.items():
        if key == "params" or key in SINGLE_TENSOR:
            continue
        if isinstance(value, (tuple, list)) and value and all(map(_is_leaf, value)):
            yield from ((f"{key}.{i}", item) for i, item in enumerate(value))
        else:
            yield key, value


def _is_leaf(value: object) -> bool:
    return _is_number(value) or isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat))


def describe_group(group: Mapping[str, Any]) -> GroupStructure:
    """Return the structure of ``group``.

    Raises:
        CodegenError: it holds a tensor with dimensions.
    """
    numbers, tensors, constants = [], [], []
    for path, value in flat_items(group):
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise CodegenError(
                    f"fuse-updates: group entry {path!r} is a tensor of many values."
                )
            tensors.append((path, value.dtype))
        elif _is_number(value):
            numbers.append((path, number_dtype(value)))
        else:
            constants.append((path, _frozen(value)))
    return GroupStructure(tuple(numbers), tuple(tensors), tuple(constants))


def _frozen(value: object) -> object:
    """Return something hashable that is equal when ``value`` is."""
    return value if isinstance(value, (bool, str, type(None))) else repr(value)


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the optimizer's own numbers and flags, which a trace takes as constants."""
    entries = {**vars(optimizer), **{f"defaults.{k}": v for k, v in optimizer.defaults.items()}}
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in entries.items() if isinstance(v, plain) and not k.startswith("_")}


def substitute_group(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``group`` with the entries at the paths of ``values`` replaced."""
    out = dict(group)
    for path, value in values.items():
        set_entry(out, path, value)
    return {**out, **{k: v for k, v in SINGLE_TENSOR.items() if k in out}}


def copy_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's attributes; a step that changes the lists and dicts changes copies."""
    plain = (dict, list, set)
    entries = vars(optimizer).items()
    return {key: copy.copy(v) if isinstance(v, plain) else v for key, v in entries}


def is_unchanged(before: object, after: object) -> bool:
    """Whether an attribute, or each item of a list or dict, is the object that it was."""
    if isinstance(before, dict) and isinstance(after, dict):
        same_keys = list(before) == list(after)
        return same_keys and all(after[key] is value for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(operator.is_, before, after))
    if isinstance(before, set) and isinstance(after, set):
        return before == after
    return after is before


def set_entry(group: dict[str, Any], path: str, value: object) -> None:
    """Replace the entry of ``group`` at ``path``; a tuple or list it is part of is copied."""
    key, _, position = path.rpartition(".")
    if not (key and position.isdigit() and isinstance(group.get(key), (tuple, list))):
        group[path] = value
        return
    items = list(group[key])
    items[int(position)] = value
    group[key] = type(group[key])(items)


def describe_state(param: torch.Tensor, state: Mapping[str, Any]) -> tuple[StateEntry, ...]:
    """Return the structure of the state of ``param``.

    Raises:
        CodegenError: an entry is neither a number, a tensor nor a flag.
    """
    entries = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                kind = "scalar"
            else:
                kind = "tensor" if value.shape == param.shape else "other"
            shape = tuple(value.shape) if kind == "other" else ()
            entries.append(StateEntry(key, kind, value.dtype, shape))
        elif _is_number(value):
            entries.append(StateEntry(key, "number", number_dtype(value)))
        elif isinstance(value, (bool, str, type(None))):
            entries.append(StateEntry(key, "constant", value))
        else:
            raise CodegenError(f"fuse-updates: state entry {key!r} is a {type(value).__name__}.")
    return tuple(entries)
