"""transformers registers hooks on a model in its first call, under a lock: done while tracing.

The hooks stay for good and are inert unless outputs are asked for, so when they are registered
does not matter. Dynamo cannot trace it, and a break in the first call would stay.

Written against transformers 5.24, ``utils.output_capturing.maybe_install_capturing_hooks``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mpcompile.capture.dynamo_handlers import handle
from mpcompile.runtime.stand_ins import is_traced_whole

_NAME = "transformers.utils.output_capturing"
_handled: set[Any] = set()


def install() -> None:
    """Register the hooks while a step is traced whole; again once transformers is imported."""
    module = sys.modules.get(_NAME)
    function = getattr(module, "maybe_install_capturing_hooks", None)
    if isinstance(module, ModuleType) and function is not None and function not in _handled:
        _handled.add(function)
        handle(function, _trace)


def _trace(self: Any, tx: Any, model: Any) -> Any:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable

    if not is_traced_whole():
        stock = UserFunctionVariable(self.value, source=self.source)
        return stock.call_function(tx, [model], {})
    self.value(model.realize().value)
    return ConstantVariable.create(None)
