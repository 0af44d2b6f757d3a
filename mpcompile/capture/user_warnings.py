"""``warnings.warn`` in code that is traced: shown while it is traced, instead of a break.

Python shows a warning once for each line unless told otherwise, and code is traced once; so it is
shown then, as from the line that it stands at, with Python's own register of what was shown. It
stays a break where eager would do more than show a text: where a filter makes it an error, and
where the text is not constant. A filter that shows every call of it shows the traced ones.

Private torch API, seen in 2.11 to 2.14: ``SkipFunctionVariable.call_function``, which breaks on
built-in functions; ``parent``, ``lineno``, ``f_code`` and ``f_globals`` of translators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

_PARAMETERS = ("message", "category", "stacklevel", "source")


def install(is_ours: Callable[[], bool]) -> None:
    """Do so while ``is_ours``; once."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import SkipFunctionVariable

    stock: Any = SkipFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_warning = self.value is warnings.warn and is_ours()
        if is_warning and _show(tx, args, kwargs):
            return ConstantVariable.create(None)
        return stock(self, tx, args, kwargs)

    SkipFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def _show(tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Show the warning that is given with these variables; return whether that is all of it."""
    given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    known = all(variable.is_python_constant() for variable in given.values())
    if not known or "message" not in given or not given.keys() <= set(_PARAMETERS):
        return False
    values = {name: variable.as_python_constant() for name, variable in given.items()}
    frame = _caller(tx, values.get("stacklevel", 1))
    try:
        warnings.warn_explicit(
            values["message"],
            values.get("category") or UserWarning,
            frame.f_code.co_filename,
            frame.lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault("__warningregistry__", {}),
        )
    except Warning:  # a filter makes an error of it, which eager raises at its place
        return False
    return True


def _caller(tx: Any, stacklevel: int) -> Any:
    """Return the translator of the frame that a warning is told of; at most that of the step."""
    for _ in range(stacklevel - 1):
        tx = tx.parent or tx
    return tx
