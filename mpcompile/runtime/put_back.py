"""Put an optimizer back to where it was before a step: parameters, state, groups.

For a step whose inside is not ours, such as one that takes a closure: it is known only afterwards
whether it is to be skipped. Tensors get their values back, containers their entries; both stay the
objects that they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from mpcompile.runtime.structure import params_of

Undo = Callable[[], Any]
"""Puts a value back and returns it."""


def remember(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that puts ``optimizer`` back to where it is now."""
    params = [param.detach() for param in params_of(optimizer)]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    own = {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float))}
    put_params, put_groups = _remembered(params), [_remembered_items(group) for group in groups]
    put_state = _remembered(optimizer.state)

    def put_back() -> None:
        with torch.no_grad():
            put_params()
            put_state()
            for group, items in zip(optimizer.param_groups, put_groups, strict=True):
                group.update(items())
        vars(optimizer).update(own)

    return put_back


def _remembered(value: Any) -> Undo:
    if isinstance(value, torch.Tensor):
        kept = value.detach().clone()
        return lambda: _refilled(value, kept)
    if isinstance(value, dict):
        entries = _remembered_items(value)
        return lambda: _replaced(value, entries())
    if isinstance(value, (list, deque)):
        items = [_remembered(item) for item in value]
        return lambda: _relisted(value, [item() for item in items])
    return lambda: value


def _remembered_items(entries: dict[Any, Any]) -> Callable[[], dict[Any, Any]]:
    items = {key: _remembered(value) for key, value in entries.items()}
    return lambda: {key: item() for key, item in items.items()}


def _refilled(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if tensor.shape != kept.shape:
        return kept
    tensor.detach().copy_(kept)
    return tensor


def _replaced(target: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    target.clear()
    target.update(entries)
    return target


def _relisted(target: Any, items: list[Any]) -> Any:
    target.clear()
    target.extend(items)
    return target
