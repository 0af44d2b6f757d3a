"""Python numbers that can be traced: hinted symbols, and a record of what was decided on them.

Private torch API, seen in 2.11 to 2.14: ``ShapeEnv`` (``create_unspecified_symbol``,
``create_symfloatnode``, ``create_symintnode``, ``evaluate_sym_node``), ``FakeTensor.item_memo``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)
DATA_HINT = 1.0
"""What a number read from tensor data is taken for while tracing."""


@dataclass(frozen=True)
class Decision:
    """Python asked for the value of a symbolic number: a branch if bool, else a baked literal."""

    symbol: Any
    value: bool | int | float


@dataclass
class Decisions:
    """The decisions of one trace; the first of them follow ``forced``."""

    forced: tuple[bool, ...] = ()
    made: list[Decision] = field(default_factory=list)

    def decide(self, node: Any, is_flag: bool = False) -> bool | int | float:
        """Answer what ``node`` (a SymNode) is, and remember it; a flag is an integer 0 or 1."""
        value = node.hint
        wrap = torch.SymInt if node.is_int() else torch.SymFloat
        if node.is_bool() or is_flag:
            branches = sum(isinstance(d.value, bool) for d in self.made)
            value = bool(value)
            if branches < len(self.forced):
                value = self.forced[branches]
            self.made.append(Decision((wrap if is_flag else torch.SymBool)(node), value))
            return int(value) if is_flag else value
        number = int(value) if node.is_int() else float(value)
        self.made.append(Decision(wrap(node), number))
        return number


class ScalarEnv(ShapeEnv):
    """A ShapeEnv for scalars only: it asks ``decisions`` and adds no guards of its own."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self.decisions = decisions
        self._num_symbols = 0
        self._flags: set[Any] = set()

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer with the hint, or with what the trace is to assume; assertions always hold."""
        if _is_asserting():
            return True
        return self.decisions.decide(sym_node, sym_node.expr in self._flags)

    def number(self, hint: int | float, is_flag: bool = False) -> Any:
        """Return a SymInt or SymFloat that is ``hint`` for now; a flag comes from a bool tensor."""
        self._num_symbols += 1
        source = ConstantSource(f"number_{self._num_symbols}")
        symbol = self.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
        if is_flag:
            self._flags.add(symbol)
        if isinstance(hint, int):
            return self.create_symintnode(symbol, hint=hint, source=source)
        return self.create_symfloatnode(symbol, hint=hint, source=source)


def _is_asserting() -> bool:
    """Whether ``torch._check`` asks; ``SymFloat.__pow__`` does, about the sign of its base."""
    frame, callers = sys._getframe(1), []
    for _ in range(5):
        if frame.f_back is None:
            break
        frame = frame.f_back
        callers.append(frame.f_code.co_name)
    return "expect_true" in callers


class ItemMode(TorchDispatchMode):
    """Gives ``tensor.item()`` a hint: the 0-dim tensors of a trace are computed alongside for real.

    ``known`` maps the id of a fake tensor to the pair of it and its value.
    """

    def __init__(self, env: ScalarEnv, values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.env = env
        self.known = {id(fake): (fake, value) for fake, value in values}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; hint its result if it reads a number, follow it if it is 0-dim."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            args[0].item_memo = self._item(args[0])
            return func(*args)
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and out.dim() == 0:
            self._follow(func, args, kwargs, out)
        return out

    def _item(self, fake: FakeTensor) -> Any:
        _, value = self.known.get(id(fake), (None, None))
        hint = DATA_HINT if value is None else value.item()
        if not fake.dtype.is_floating_point:
            hint = int(hint)
        return self.env.number(hint, is_flag=fake.dtype is torch.bool)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: FakeTensor) -> None:
        flat, spec = tree_flatten((args, kwargs))
        if any(isinstance(x, torch.Tensor) and id(x) not in self.known for x in flat):
            return
        real_args, real_kwargs = tree_unflatten([self._real(x) for x in flat], spec)
        with _disable_current_modes():
            self.known[id(out)] = (out, func(*real_args, **real_kwargs))

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.known[id(value)][1]
        return value.node.hint if isinstance(value, SYMBOLS) else value


def fake_mode(env: ScalarEnv) -> FakeTensorMode:
    """Return the mode in which the fake tensors of one trace live."""
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
