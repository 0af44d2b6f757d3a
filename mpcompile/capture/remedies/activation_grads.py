"""``activation.requires_grad = True``: traced as ``activation.requires_grad_()``.

Dynamo traces the method, but not the assignment. An input's own flag is left alone.

Private torch API, seen in 2.13 and 2.14: ``SetAttrBuiltinVariable._call_setattr``. Older versions
trace neither.
"""

from __future__ import annotations

from typing import Any

from mpcompile.runtime.stand_ins import is_traced_whole


def install() -> None:
    """Replace the assignment by the method in steps that are traced whole."""
    from torch._dynamo.variables import builtin

    variable: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
    if variable is None:
        return
    stock = variable._call_setattr

    def call_setattr(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if is_traced_whole() and _sets_flag(obj, name, value):
            obj.call_method(tx, "requires_grad_", [value], {})
            return value
        return stock(self, tx, obj, name, value)

    variable._call_setattr = call_setattr


def _sets_flag(obj: Any, name: Any, value: Any) -> bool:
    if not obj.is_tensor() or obj.source or not name.is_python_constant():
        return False
    is_flag: bool = name.as_python_constant() == "requires_grad"
    return is_flag and bool(value.is_python_constant())
