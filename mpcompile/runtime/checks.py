"""``mpcompile::check``: the op that stands for ``if condition: raise ...`` in a graph.

Where the condition holds, the program's own ``raise`` statement runs, so the error is eager's. The
statement and the Python values that it reads are in a table behind the op's key.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("mpcompile", "FRAGMENT")
_LIBRARY.define("check(Tensor condition, bool raises_if, Tensor[] values, str key) -> ()")


@dataclass(frozen=True, eq=False)
class Check:
    """A ``raise`` statement with what it reads.

    Attributes:
        statement: the statement, parsed; its line numbers are the file's.
        file: where it stands.
        scope: globals of its function.
        constants: Python values by name.
        tensors: names of values that the graph hands over.
    """

    statement: ast.Raise
    file: str
    scope: dict[str, Any]
    constants: Mapping[str, Any]
    tensors: tuple[str, ...]

    def fail(self, values: Sequence[Tensor]) -> None:
        """Run the statement."""
        names = dict(self.constants) | dict(zip(self.tensors, values, strict=True))
        exec(self._code(), self.scope, names)

    def _code(self) -> CodeType:
        return compile(ast.Module([self.statement], []), self.file, "exec")

    def text(self) -> str:
        """Return what distinguishes the statement from others."""
        return f"{self.file}:{self.statement.lineno} {ast.dump(self.statement)} {self.tensors}"

    def equals(self, other: Check) -> bool:
        """Whether ``other`` is the same statement that reads the same objects."""
        if self.text() != other.text() or self.constants.keys() != other.constants.keys():
            return False
        pairs = ((value, other.constants[name]) for name, value in self.constants.items())
        return self.scope is other.scope and all(_is_same(a, b) for a, b in pairs)


def _is_same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, (str, int, float)) and type(a) is type(b) and a == b)


_checks: dict[str, Check] = {}


def register(check: Check) -> str:
    """Return the key of ``check`` for ``mpcompile::check``; equal ones share a key."""
    content = hashlib.sha256(check.text().encode()).hexdigest()[:32]
    position = 0
    while (key := f"{content}-{position}") in _checks and not _checks[key].equals(check):
        position += 1
    _checks.setdefault(key, check)
    return key


def _check(condition: Tensor, raises_if: bool, values: Sequence[Tensor], key: str) -> None:
    if bool(condition) is raises_if:
        _checks[key].fail(values)


_LIBRARY.impl("check", _check, "CompositeExplicitAutograd")
torch.library.register_fake("mpcompile::check", lambda *args: None, lib=_LIBRARY)
torch.fx.node.has_side_effect(torch.ops.mpcompile.check.default)
