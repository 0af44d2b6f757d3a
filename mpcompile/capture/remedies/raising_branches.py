"""``if labels.max() >= num_classes: raise ...``: a check in the graph instead of a break.

Only a branch that holds a ``raise`` statement and nothing else, and whose error leaves the step.

Private torch API, seen in 2.11 to 2.14: ``dispatch_table`` of the instruction translators, their
``instructions``, ``instruction_pointer``, ``jump``, ``pop``, ``push``, ``symbolic_locals`` and
``f_globals``; ``CellVariable`` and ``SideEffects.load_cell``.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpcompile.runtime import checks
from mpcompile.runtime.stand_ins import is_traced_whole

Jump = Callable[[Any, Any], None]


def install() -> None:
    """Replace such branches in steps that are traced whole."""
    from torch._dynamo import symbolic_convert

    for translator in _subclasses(symbolic_convert.InstructionTranslatorBase):
        table: list[Any] = translator.dispatch_table
        for name, opcode in dis.opmap.items():
            if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
                table[opcode] = _wrap(table[opcode], jumps_if=name.endswith("TRUE"))


def _subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _wrap(stock: Jump, jumps_if: bool) -> Jump:
    def jump(self: Any, inst: Any) -> None:
        if (
            not is_traced_whole()
            or not self.stack[-1].is_tensor()
            or not _replace(self, inst, jumps_if)
        ):
            stock(self, inst)

    return jump


def _replace(tx: Any, inst: Any, jumps_if: bool) -> bool:
    """Emit a check and go on where it holds nothing; return whether that was possible."""
    following = tx.instructions[tx.instruction_pointer]
    raise_follows = True
    statement = _raise_at(tx, following)
    if statement is None:
        raise_follows, statement = False, _raise_at(tx, inst.target)
    check: checks.Check | None = None
    values: list[Any] = []
    if statement is not None and not _is_caught(tx):
        check, values = _build(tx, statement)
    if check is None:
        return False
    condition = tx.pop().as_proxy()
    raises_if = jumps_if != raise_follows
    args = (condition, raises_if, values, checks.register(check))
    tx.output.create_proxy("call_function", torch.ops.mpcompile.check.default, args, {})
    if raise_follows:
        tx.jump(inst)
    return True


def _raise_at(tx: Any, first: Any) -> ast.Raise | None:
    """Return the ``raise`` statement that ``first`` begins, if that is all that is there."""
    start = tx.indexof[first]
    for inst in tx.instructions[start:]:
        if inst.opname == "RAISE_VARARGS":
            return _parse(tx.f_code.co_filename, first.positions, inst.positions)
        if "JUMP" in inst.opname or inst.opname.startswith(("STORE", "RETURN", "POP", "DELETE")):
            return None
    return None


def _parse(file: str, first: Any, span: Any) -> ast.Raise | None:
    """Return the statement at ``span``; None if ``first`` stands before it, or without source."""
    if span is None or first is None or None in (span.lineno, first.lineno, span.end_lineno):
        return None
    if (first.lineno, first.col_offset) < (span.lineno, span.col_offset):
        return None
    lines = linecache.getlines(file)[span.lineno - 1 : span.end_lineno]
    try:
        body = ast.parse(textwrap.dedent("".join(lines))).body
    except SyntaxError:  # ``if bad: raise ...`` on one line
        return None
    if len(body) != 1 or not isinstance(body[0], ast.Raise) or body[0].exc is None:
        return None
    ast.increment_lineno(body[0], span.lineno - 1)
    return body[0]


def _is_caught(tx: Any) -> bool:
    """Whether the step itself may handle an error that is raised here."""
    while tx is not None:
        entry = tx.current_instruction.exn_tab_entry
        if entry is not None and _may_swallow(tx, entry.target):
            return True
        tx = tx.parent
    return False


def _may_swallow(tx: Any, handler: Any) -> bool:
    """Whether ``handler`` is more than a ``finally`` or the end of a ``with``."""
    for inst in tx.instructions[tx.indexof[handler] :]:
        if inst.opname in ("RERAISE", "WITH_EXCEPT_START"):
            return False
        if inst.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT"):
            return True
    return True


def _build(tx: Any, statement: ast.Raise) -> tuple[checks.Check | None, list[Any]]:
    """Return the check and the proxies of the tensors that it reads."""
    constants: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    for name in sorted(names):
        variable = _local(tx, name)
        if variable is None:
            if name not in tx.f_globals and not hasattr(builtins, name):
                return None, []
        elif variable.is_tensor():
            tensors[name] = variable.as_proxy()
        elif variable.is_python_constant():
            constants[name] = variable.as_python_constant()
        elif hasattr(variable, "value"):
            constants[name] = variable.value
        else:
            return None, []
    file = tx.f_code.co_filename
    check = checks.Check(statement, file, tx.f_globals, constants, tuple(tensors))
    return check, list(tensors.values())


def _local(tx: Any, name: str) -> Any:
    from torch._dynamo.variables.misc import CellVariable

    variable = tx.symbolic_locals.get(name)
    if isinstance(variable, CellVariable):
        variable = tx.output.side_effects.load_cell(variable)
    return None if variable is None else variable.realize()
