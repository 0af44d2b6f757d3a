"""Permanent dispatchers in ``Optimizer.step``: ours where our step runs, else the original.

Each class's step is wrapped by ``Optimizer.profile_hook_step`` when the class is first used. The
dispatcher goes inside that wrapper, into its closure, so step hooks, profiling ranges and whoever
took a reference earlier (a learning-rate scheduler, ``torch.compile(opt.step)``) keep working.

Private torch API, seen in 2.11 to 2.14: ``Optimizer.profile_hook_step`` and the ``func`` in the
closure of what it returns; ``torch._dynamo.assume_constant_result``;
``torch._C._dynamo.eval_frame.get_eval_frame_callback`` and ``set_eval_frame``;
``torch._dynamo.eval_frame.skip_code``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo.eval_frame import skip_code

from mpcompile.runtime import stand_ins

Step = Callable[..., Any]
Runner = Callable[[torch.optim.Optimizer, Step], Any]
"""Updates the optimizer; the second argument is its own step, a function of the optimizer."""

BREAK_REASON = "fuse-updates takes Optimizer.step out of the graph"
"""Why Dynamo ends a graph in this file, for reports."""

_local = threading.local()
_install_lock = threading.Lock()
_installed = False


def _runners() -> list[Runner | None]:
    if not hasattr(_local, "runners"):
        _local.runners = []
    runners: list[Runner | None] = _local.runners
    return runners


@contextlib.contextmanager
def running(runner: Runner) -> Iterator[None]:
    """Have steps in this thread go to ``runner``."""
    install()
    stack = _runners()
    stack.append(runner)
    try:
        yield
    finally:
        stack.pop()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Have steps in this thread go to the originals."""
    stack = _runners()
    stack.append(None)
    try:
        yield
    finally:
        stack.pop()


def is_running() -> bool:
    """Whether a step of ours runs, or is being traced, in this thread."""
    return bool(_runners())


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def is_ours() -> bool:
    """Whether a step that starts now is part of a step of ours.

    Dynamo asks while it traces and keeps the answer, which belongs to the backend it traces for. At
    run time, code that is excluded from compilation is not part of the step.
    """
    stack = _runners()
    if not stack or stack[-1] is None:
        return False
    is_tracing = torch._guards.TracingContext.try_get() is not None
    return is_tracing or callable(eval_frame.get_eval_frame_callback())


# Where Dynamo leaves a frame to Python, it would compile these two on their own. Unlike a disabled
# function, a skipped one still sees whether compilation is on.
skip_code(_runners.__code__)
skip_code(is_ours.__code__)
skip_code(stand_ins.is_traced_whole.__code__)


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch's
def _run(optimizer: torch.optim.Optimizer, original: Step) -> Any:
    stack = _runners()
    runner = stack[-1] if stack else None
    if runner is None:
        return original(optimizer)
    return runner(optimizer, original)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of the optimizer's class for where its hooks run elsewhere."""
    step: Any = type(optimizer).step
    inner: Step = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


def dispatching(original: Step) -> Step:
    """Return a step that is ``original`` except where our step runs.

    A closure is part of our step: where ``original`` is torch's, it is called first, as that does.
    A step that a subclass calls as its base's is part of the subclass's own.
    """
    code = _innermost(original)
    calls_first = code.__module__.startswith("torch.optim.") and "LBFGS" not in code.__qualname__
    own = str(id(code))  # Dynamo would make an int that is not always the same dynamic

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_ours() or not stand_ins.is_own_step(self, own):
            return original(self, *args, **kwargs)
        loss = None
        if args or kwargs:
            if len(args) + len(kwargs) > 1 or (kwargs and "closure" not in kwargs):
                return original(self, *args, **kwargs)
            closure = args[0] if args else kwargs["closure"]
            if not calls_first:
                return _run_with_closure(self, original, closure)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        if not stand_ins.update_in_graph(self, stand_ins.EPOCH):
            _run(self, original)
        return loss

    step.is_mpcompile_dispatcher = True  # type: ignore[attr-defined]  # a mark on a function
    return step


def _innermost(step: Any) -> Any:
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _run_with_closure(optimizer: torch.optim.Optimizer, original: Step, closure: Any) -> Any:
    """Run ``original``, which may call ``closure`` whenever it likes; only that is compiled."""
    callback = eval_frame.set_eval_frame(None)

    def compiled() -> Any:
        outside = eval_frame.set_eval_frame(callback)
        try:
            return closure()
        finally:
            eval_frame.set_eval_frame(outside)

    try:
        return original(optimizer, compiled)
    finally:
        eval_frame.set_eval_frame(callback)


skip_code(_run_with_closure.__code__)


def _zero_grad_dispatching(stock: Callable[..., None]) -> Callable[..., None]:
    """Return a ``zero_grad`` that Dynamo can trace; the stock one it may not enter."""

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if stand_ins.is_traced_whole():
            stand_ins.zero_grad(self, set_to_none)
        else:
            stock(self, set_to_none)

    zero_grad.__doc__ = stock.__doc__
    return zero_grad


def install() -> None:
    """Put dispatchers into all optimizer classes, those to come included; once."""
    global _installed
    with _install_lock:
        if _installed:
            return
        _installed = True
        wrap_step = torch.optim.Optimizer.profile_hook_step

        def profile_hook_step(func: Step) -> Step:
            return wrap_step(dispatching(func))

        torch.optim.Optimizer.profile_hook_step = staticmethod(  # type: ignore[method-assign]
            functools.wraps(wrap_step)(profile_hook_step)
        )
        zero_grad = _zero_grad_dispatching(torch.optim.Optimizer.zero_grad)
        torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        for cls in _subclasses(torch.optim.Optimizer):
            step = vars(cls).get("step")
            if getattr(step, "hooked", False):
                _enter(step)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    direct: list[type[Any]] = cls.__subclasses__()
    for subclass in direct:
        yield subclass
        yield from _subclasses(subclass)


def _enter(hooked: Any) -> None:
    """Replace the step inside ``hooked``, which ``profile_hook_step`` made."""
    if "func" not in hooked.__code__.co_freevars:
        return
    cell = hooked.__closure__[hooked.__code__.co_freevars.index("func")]
    if not getattr(cell.cell_contents, "is_mpcompile_dispatcher", False):
        cell.cell_contents = dispatching(cell.cell_contents)
