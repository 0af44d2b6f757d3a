"""Hooks on AccumulateGrad nodes, which torch keeps where Python cannot list them.

A node's ``register_hook`` and ``register_prehook`` hand the hooks that there are to a Python
function of ``torch.autograd.function``. It is replaced by one that tells them to ``hooks_of`` and
registers nothing then, and that notes when somebody else registers something.

Private torch API, seen in 2.11 to 2.14: ``torch.autograd.function._HookMixin._register_hook`` and
that it is what ``THPCppFunction`` calls. Hooks that C++ code puts there (DDP's, FSDP's) are not
told; those wrappers are recognised by type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.utils._python_dispatch import _disable_current_modes

_REGISTRARS = ("register_hook", "register_prehook")
_QUESTION: Any = object()
"""Registered as a hook to ask which hooks there are."""


class _Answer(Exception):  # not an error: it keeps torch from going on
    def __init__(self, hooks: Mapping[int, Any] | None) -> None:
        super().__init__()
        self.hooks = hooks


def install(note: Callable[[], None]) -> None:
    """Have ``note`` called whenever a node of autograd gets a hook; once."""
    register: Any = _HookMixin._register_hook

    def telling(hooks: Any, hook: Any) -> Any:
        if hook is _QUESTION:
            raise _Answer(hooks)
        note()
        return register(hooks, hook)

    _HookMixin._register_hook = staticmethod(telling)  # type: ignore[method-assign]


def has_node_hooks(param: torch.Tensor) -> bool:
    """Whether the AccumulateGrad node of ``param``, a leaf, has hooks of Python's."""
    if not param.requires_grad:
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        path: Any = param.view_as(param).grad_fn
    node = path.next_functions[0][0]
    return any(_ask(getattr(node, name)) for name in _REGISTRARS)


def _ask(register: Callable[..., Any]) -> bool:
    try:
        register(_QUESTION)
    except _Answer as answer:
        return bool(answer.hooks)
    raise AssertionError("torch registers hooks of nodes in another way")
