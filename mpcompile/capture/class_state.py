"""State that a step keeps on a class: torch 2.11 takes it for constant.

A number is that of the first call then, and what is added to a list goes to a new one. Newer
versions of Dynamo guard such an attribute as any other.

Private torch API, of 2.11 and 2.12: ``UserDefinedClassVariable.var_getattr``, ``AttrSource``,
``ConstantVariable.is_literal``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def install(has_session: Callable[[], bool]) -> None:
    """Have what is read of users' classes guarded while a step of ours is traced."""
    if torch.__version__ >= "2.13":  # a TorchVersion compares as versions do
        return
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    variable: Any = UserDefinedClassVariable
    stock = variable.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if self.source is not None and has_session() and _is_users(self.value, name):
            held = inspect.getattr_static(self.value, name)
            if ConstantVariable.is_literal(held):
                return VariableTracker.build(tx, held, AttrSource(self.source, name))
        return stock(self, tx, name)

    variable.var_getattr = var_getattr


def _is_users(cls: type[Any], name: str) -> bool:
    """Whether ``name`` is an attribute of a class that is not torch's."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    module = owner.__module__.partition(".")[0] if owner is not None else "builtins"
    return module not in ("builtins", "torch") and not name.startswith("__")
