"""Trace an optimizer's own step code for a few representative parameters.

The step runs unwrapped on a shallow copy of the optimizer whose groups and state hold fake tensors
and symbolic numbers, under ``make_fx`` and ``functionalize``: a flat graph without mutation. Python
numbers stay inputs; where Python branches on one, the branch taken is recorded (``symbols``).

While ``make_fx`` runs, ``nn.Module.__call__`` is another function in the whole process, so a trace
holds Dynamo's own lock; and no thread may call what is compiled, so a trace takes the mark back
that says so; until it can, it says that it compiles, which makes that mark count for nothing.
Private torch API, seen in 2.11 to 2.14: ``convert_frame.compile_lock``,
``_symbolic_trace._is_fx_tracing_flag``, ``torch.compiler._is_compiling_flag``.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.fx import GraphModule, _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.codegen.values import NOBODY, Leaf
from mpcompile.errors import CodegenError
from mpcompile.runtime import dispatch
from mpcompile.runtime.structure import (
    GroupStructure,
    ParamStructure,
    copy_attributes,
    flat_items,
    is_unchanged,
    substitute_group,
)
from mpcompile.runtime.symbolic_math import symbolic_math
from mpcompile.runtime.symbols import SYMBOLS, Decisions, ItemMode, ScalarEnv, fake_mode
from mpcompile.runtime.watching import WatchMode


class StateMissing(CodegenError):
    """The step creates state; let the optimizer do that itself, once."""


@dataclass(frozen=True)
class Representative:
    """A parameter that stands for its class, with the optimizer's state for it.

    ``group`` is its group's position among those that are traced, ``number`` that of its class.
    """

    param: torch.Tensor
    state: dict[str, Any]
    structure: ParamStructure
    group: int = 0
    number: int = 0


@dataclass(frozen=True)
class TracedGroup:
    """A group of the optimizer; ``owner`` marks the names of its numbers if it is not alone."""

    entries: dict[str, Any]
    structure: GroupStructure
    owner: str = ""


@dataclass(frozen=True)
class StepTrace:
    """The graph of one trace. ``outputs`` and then ``decisions`` name its outputs, in order."""

    gm: GraphModule
    leaves: tuple[Leaf, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[Leaf, ...]
    decisions: Decisions
    reads_shape: bool
    classes: tuple[int, ...] = (0, 0)


def step_code(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class without the wrappers around it."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    code: Callable[..., Any] = step
    return code


class _Inputs:
    """The fake tensors and symbols of one trace, in placeholder order, and what each stands for."""

    def __init__(self, env: ScalarEnv, scale: float) -> None:
        self.env, self.mode, self.scale = env, fake_mode(env), scale
        self.flat: list[Any] = []
        self.leaves: list[Leaf] = []
        self.values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, name: str, owner: int, like: torch.Tensor) -> int:
        """Add a tensor like ``like``; return its position."""
        with self.mode:
            fake = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        if like.dim() == 0:
            value = like.detach().clone()
            self.values.append((fake, value if owner < 0 else value.mul(self.scale).to(like.dtype)))
        return self._add(name, owner, fake)

    def number(self, name: str, owner: int, hint: float) -> int:
        """Add a Python number; return its position."""
        if owner >= 0:
            hint = type(hint)(hint * self.scale)
        return self._add(name, owner, self.env.number(hint))

    def _add(self, name: str, owner: int, value: Any) -> int:
        self.flat.append(value)
        self.leaves.append(Leaf(name, owner))
        return len(self.flat) - 1


@dataclass(frozen=True)
class _Slots:
    """Positions among the inputs: of each group's entries, and of each representative's."""

    groups: tuple[dict[str, int], ...]
    owned: tuple[dict[str, int], ...]


def _add_inputs(
    inputs: _Inputs, groups: Sequence[TracedGroup], reps: Sequence[Representative]
) -> _Slots:
    shared: list[dict[str, int]] = []
    for group in groups:
        values, prefix = dict(flat_items(group.entries)), f"{group.owner}group."
        at = {p: inputs.number(prefix + p, -1, values[p]) for p, _ in group.structure.numbers}
        for path, _ in group.structure.tensors:
            at[path] = inputs.tensor(prefix + path, -1, values[path].detach().reshape(()))
        shared.append(at)
    owned = []
    for owner, rep in enumerate(reps):
        at = {
            "param": inputs.tensor(f"{owner}:param", owner, rep.param.detach()),
            "grad": inputs.tensor(f"{owner}:grad", owner, rep.param.detach()),
        }
        for entry in rep.structure.state:
            name, value = f"{owner}:state.{entry.key}", rep.state[entry.key]
            if entry.kind == "number":
                at[entry.key] = inputs.number(name, owner, value)
            elif entry.kind != "constant":
                at[entry.key] = inputs.tensor(name, owner, value)
        owned.append(at)
    return _Slots(tuple(shared), tuple(owned))


def trace_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TracedGroup],
    reps: Sequence[Representative],
    forced: tuple[bool, ...] = (),
) -> StepTrace:
    """Trace one step of ``optimizer`` on ``reps``, with ``groups`` for its groups.

    The outputs are every tensor and number of the representatives after the step, named as the
    leaves are. Branches follow ``forced`` as far as it goes, then the values of the moment. On a
    forced path these may make no sense (the root of a negative number), so others are tried.

    Raises:
        StateMissing: the step creates state.
        CodegenError: the step cannot be traced; the message says why.
    """
    for scale in _STATE_SCALES[: len(_STATE_SCALES) if forced else 1]:
        try:
            return _trace_once(optimizer, groups, reps, forced, scale)
        except StateMissing:
            raise
        except CodegenError as error:
            failure = error
    raise failure


_STATE_SCALES = (1.0, 1000.0, 0.001)
"""Factors on the state's numbers while tracing; they reach both ends of a warm-up."""


def _trace_once(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TracedGroup],
    reps: Sequence[Representative],
    forced: tuple[bool, ...],
    scale: float,
) -> StepTrace:
    with compile_lock:
        decisions = Decisions(forced)
        inputs = _Inputs(ScalarEnv(decisions), scale)
        slots = _add_inputs(inputs, groups, reps)
        watch = WatchMode()
        names: list[Leaf] = []
        run = functools.partial(_run_step, optimizer, groups, reps, slots, names, watch)

        compiles = torch.compiler._is_compiling_flag

        def traced(*flat: Any) -> tuple[list[Any], list[Any]]:
            _symbolic_trace._is_fx_tracing_flag = False  # fx restores it when it is done
            torch.compiler._is_compiling_flag = compiles
            with ItemMode(inputs.env, inputs.values):
                out = torch.func.functionalize(run)(*flat)
            return out, [made.symbol for made in decisions.made]

        quiet = dispatch.suspended()
        with quiet, torch.no_grad(), inputs.mode, symbolic_math(optimizer), reasons(optimizer):
            torch.compiler._is_compiling_flag = True  # until ``traced`` runs; see above
            try:
                gm = make_fx(traced, tracing_mode="real")(*inputs.flat)
            finally:
                torch.compiler._is_compiling_flag = compiles
    shapes = tuple(tuple(rep.param.shape) for rep in reps)
    classes = tuple(rep.number for rep in reps)
    leaves, outputs = tuple(inputs.leaves), tuple(names)
    return StepTrace(gm, leaves, shapes, outputs, decisions, watch.reads_shape, classes)


@contextlib.contextmanager
def reasons(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Turn what the user's step raises on fake tensors into one error with the reason."""
    try:
        yield
    except CodegenError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        NotImplementedError,
        AssertionError,
        LookupError,
        ArithmeticError,
    ) as error:
        text = str(error).strip().splitlines()
        raise CodegenError(
            f"fuse-updates: {type(optimizer).__name__}.step cannot be traced "
            f"({type(error).__name__}: {text[0] if text else ''})."
        ) from error


def _run_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[TracedGroup],
    reps: Sequence[Representative],
    slots: _Slots,
    names: list[Leaf],
    watch: WatchMode,
    *flat: Any,
) -> list[Any]:
    """Run the step on a copy of the optimizer that holds ``flat``; return what it left."""
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(copy_attributes(optimizer))
    copy.grad_scale = copy.found_inf = None
    shared = [
        substitute_group(group.entries, {path: flat[at] for path, at in slot.items()})
        for group, slot in zip(groups, slots.groups, strict=True)
    ]
    for index, group in enumerate(shared):
        pairs = zip(reps, slots.owned, strict=True)
        group["params"] = [flat[at["param"]] for rep, at in pairs if rep.group == index]
    copy.param_groups, copy.state = shared, defaultdict(dict)
    before = [dict(group) for group in shared]
    for rep, at in zip(reps, slots.owned, strict=True):
        param = flat[at["param"]]
        param.grad = flat[at["grad"]]
        copy.state[param] = {
            entry.key: flat[at[entry.key]] if entry.key in at else rep.state[entry.key]
            for entry in rep.structure.state
        }
    with watch:
        step_code(optimizer)(copy)
    _refuse_other_changes(optimizer, copy, shared, before)
    names.clear()
    values = _results(copy, reps, slots, names, flat)
    return values + _group_results(groups, shared, slots, names, flat)


def _refuse_other_changes(
    optimizer: torch.optim.Optimizer,
    copy: Any,
    groups: Sequence[dict[str, Any]],
    before: Sequence[dict[str, Any]],
) -> None:
    """Refuse a step that keeps anything outside the state: it would be the same at every step."""
    for group, old in zip(groups, before, strict=True):
        now, then = dict(flat_items(group)), dict(flat_items(old))
        if set(now) - set(then):
            raise StateMissing("fuse-updates: the step creates entries of its group.")
        changed = [p for p, was in then.items() if p not in now or not _is_same(was, now[p])]
        if changed or group["params"] is not old["params"]:
            what = changed[0] if changed else "params"
            raise CodegenError(f"fuse-updates: the step changes {what!r} of its group.")
    params = {id(param) for group in groups for param in group["params"]}
    others = [key for key in (*optimizer.state, *copy.state) if not isinstance(key, torch.Tensor)]
    others += [key for key in copy.state if id(key) not in params]
    if others:
        raise CodegenError(
            f"fuse-updates: the step keeps state of no parameter ({str(others[0])[:40]!r})."
        )
    expected = vars(optimizer)
    ours = ("param_groups", "state", "grad_scale", "found_inf")
    now = {key: value for key, value in vars(copy).items() if key not in ours}
    changed = [key for key, value in now.items() if not is_unchanged(expected.get(key), value)]
    if changed:
        raise CodegenError(f"fuse-updates: the step changes its attribute {changed[0]!r}.")


def _is_same(before: object, after: object) -> bool:
    """Whether an entry of a group is what it was; a number may be another one."""
    numbers = (int, float, *SYMBOLS)
    return after is before or (isinstance(before, SYMBOLS) and isinstance(after, numbers))


def _group_results(
    groups: Sequence[TracedGroup],
    after: Sequence[dict[str, Any]],
    slots: _Slots,
    names: list[Leaf],
    flat: Sequence[Any],
) -> list[Any]:
    """Return the numbers of groups that the step changed, and their tensors; append the names."""
    values = []
    for group, entries, slot in zip(groups, after, slots.groups, strict=True):
        now = dict(flat_items(entries))
        for path, at in slot.items():
            if isinstance(now[path], torch.Tensor) or now[path] is not flat[at]:
                values.append(now[path])
                names.append(Leaf(f"{group.owner}group.{path}", NOBODY))
    return values


def _results(
    copy: torch.optim.Optimizer,
    reps: Sequence[Representative],
    slots: _Slots,
    names: list[Leaf],
    flat: Sequence[Any],
) -> list[Any]:
    """Return the parameters, gradients and states that the step left; append their names."""
    values: list[Any] = []
    for owner, (rep, at) in enumerate(zip(reps, slots.owned, strict=True)):
        param = flat[at["param"]]
        values += [param, flat[at["grad"]]]
        names += [Leaf(f"{owner}:param", owner), Leaf(f"{owner}:grad", owner)]
        after = copy.state[param]
        if set(after) != {entry.key for entry in rep.structure.state}:
            raise StateMissing("fuse-updates: the step creates state.")
        for entry in rep.structure.state:
            value = after[entry.key]
            if entry.kind == "constant":
                if value is not rep.state[entry.key]:
                    raise StateMissing(f"fuse-updates: the step sets state {entry.key!r}.")
                continue
            _check_same_kind(entry.key, flat[at[entry.key]], value)
            values.append(value)
            names.append(Leaf(f"{owner}:state.{entry.key}", owner))
    return values


def _check_same_kind(key: str, before: Any, after: Any) -> None:
    if isinstance(before, torch.Tensor):
        same = isinstance(after, torch.Tensor)
        same = same and after.shape == before.shape and after.dtype == before.dtype
    else:
        same = isinstance(after, (int, float, *SYMBOLS))
    if not same:
        raise CodegenError(f"fuse-updates: the step changes what state {key!r} is.")
