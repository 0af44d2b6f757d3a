"""Calls of a logger, as transformers' models make: run after the graph instead of breaking it.

What is logged must be constant: a tensor would be printed as it is after the update.

Private torch API, seen in 2.11 to 2.14: ``LoggingLoggerVariable.call_method``,
``DebuggingVariable`` and ``InstructionTranslator.debug_locals``, which Dynamo's own
``reorderable_logging_functions`` uses.
"""

from __future__ import annotations

from typing import Any

from mpcompile.runtime.stand_ins import is_traced_whole


def install() -> None:
    """Defer calls whose result is unused, in steps that are traced whole."""
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    stock: Any = LoggingLoggerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if is_traced_whole() and _is_deferrable(self, tx, args, kwargs):
            return _defer(self, tx, name, args)
        return stock(self, tx, name, args, kwargs)

    LoggingLoggerVariable.call_method = call_method  # type: ignore[method-assign]


def _is_deferrable(logger: Any, tx: Any, args: list[Any], kwargs: Any) -> bool:
    is_statement = tx.next_instruction.opname == "POP_TOP"
    return is_statement and bool(logger.source) and not kwargs and all(map(_is_constant, args))


def _is_constant(variable: Any) -> bool:
    from torch._dynamo.variables.misc import StringFormatVariable

    if isinstance(variable, StringFormatVariable):
        parts = [*variable.sym_args, *variable.sym_kwargs.values()]
        return all(part.is_python_constant() for part in parts)
    return bool(variable.is_python_constant())


def _defer(logger: Any, tx: Any, name: str, args: list[Any]) -> Any:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import DebuggingVariable

    call = DebuggingVariable(getattr(logger.value, name), source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((call, args))
    return ConstantVariable.create(None)
