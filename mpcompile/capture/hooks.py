"""Notice hooks that are put on parameters after a step was traced without them.

A traced backward calls no hook, and Dynamo guards on none. Checking each parameter before each call
would cost more than the step's dispatch, so registration itself tells. That of a node's hook does
not tell which node it is: all are looked at then, before the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mpcompile.capture import node_hooks
from mpcompile.runtime.stand_ins import expire_graphs

_REGISTRARS = ("register_hook", "register_post_accumulate_grad_hook")
_unhooked = WeakTensorKeyDictionary()
_node_was_hooked = False


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``backward()`` calls something of the user's when it gets to ``tensor``, a leaf."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return has_own_hooks(tensor) or bool(after) or node_hooks.has_node_hooks(tensor)


def has_own_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``autograd.grad`` calls something of the user's for the gradient of ``tensor``."""
    return bool(tensor._backward_hooks)


def keep_unhooked(params: Iterable[torch.Tensor]) -> None:
    """Expire all graphs when one of ``params`` gets a hook."""
    for param in params:
        _unhooked[param] = True


def forget(params: Iterable[torch.Tensor]) -> None:
    """Let ``params`` have hooks: no graph relies on there being none."""
    for param in params:
        _unhooked.pop(param, None)


def check() -> None:
    """Expire all graphs if the node of a parameter that they rely on has got a hook."""
    global _node_was_hooked
    if _node_was_hooked:
        _node_was_hooked = False
        if any(map(node_hooks.has_node_hooks, list(_unhooked))):
            expire_graphs()


def _note_node() -> None:
    global _node_was_hooked
    _node_was_hooked = True


def install() -> None:
    """Put dispatchers into ``Tensor.register_hook`` and its like; once."""
    for name in _REGISTRARS:
        setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name)))
    node_hooks.install(_note_node)


def _telling(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def telling(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_leaf and self in _unhooked:
            expire_graphs()
        return register(self, *args, **kwargs)

    return telling
