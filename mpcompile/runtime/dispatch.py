"""Permanent dispatchers in ``Optimizer.step``: ours where our step runs, else the original.

Each class's step is wrapped by ``Optimizer.profile_hook_step`` when the class is first used. The
dispatcher goes inside that wrapper, into its closure, so step hooks, profiling ranges and whoever
took a reference earlier (a learning-rate scheduler, ``torch.compile(opt.step)``) keep working.

Private torch API, seen in 2.11 to 2.14: ``Optimizer.profile_hook_step`` and the ``func`` in the
closure of what it returns; the dicts of step hooks; ``torch._dynamo.assume_constant_result``;
``torch._C._dynamo.eval_frame.get_eval_frame_callback`` and ``set_eval_frame``;
``torch._dynamo.eval_frame.skip_code``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as torch_optimizer
from torch._C._dynamo import eval_frame
from torch._dynamo.eval_frame import skip_code

from mpcompile.runtime import scaler_steps, stand_ins
from mpcompile.runtime.late_state import settle

Step = Callable[..., Any]
Runner = Callable[[torch.optim.Optimizer, Step], Any]
"""Updates the optimizer; the second argument is its own step, a function of the optimizer."""
Guard = Callable[[torch.optim.Optimizer, Sequence[Any]], Callable[[], None]]
"""Called before a step that runs as it is, with its arguments; what it returns after it."""

Cleared = Callable[[torch.optim.Optimizer], None]
"""Told of each optimizer whose gradients the step has set to None, where no graph does it."""

BREAK_REASON = "fuse-updates takes Optimizer.step out of the graph"
"""Why Dynamo ends a graph in this file, for reports."""
CLEARED_REASON = "in regions Optimizer.zero_grad runs as it stands"


class _Ours(NamedTuple):
    """What steps in a thread go to."""

    runner: Runner | None
    guard: Guard | None
    cleared: Cleared | None = None


_local = threading.local()
_install_lock = threading.Lock()
_installed = False


_ORIGINALS = _Ours(None, None)


def _runners() -> list[_Ours]:
    if not hasattr(_local, "runners"):
        _local.runners = []
    runners: list[_Ours] = _local.runners
    return runners


@contextlib.contextmanager
def running(
    runner: Runner, guard: Guard | None = None, cleared: Cleared | None = None
) -> Iterator[None]:
    """Have steps in this thread go to ``runner``, and tell ``cleared`` of ``zero_grad``.

    Those that take arguments, a closure say, run as they are, in ``guard``.
    """
    install()
    stack = _runners()
    stack.append(_Ours(runner, guard, cleared))
    try:
        yield
    finally:
        stack.pop()


@contextlib.contextmanager
def suspended(guard: Guard | None = None) -> Iterator[None]:
    """Have steps in this thread go to the originals; those with arguments run in ``guard``."""
    stack = _runners()
    stack.append(_Ours(None, guard))
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
    return _innermost().runner is not None and _is_compiled()


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def is_guarded() -> bool:
    """Whether a step with arguments that starts now is to run in a guard."""
    return _innermost().guard is not None and _is_compiled()


def _innermost() -> _Ours:
    stack = _runners()
    return stack[-1] if stack else _ORIGINALS


def _is_compiled() -> bool:
    """Whether the code that runs is compiled, or is being traced."""
    is_tracing = torch._guards.TracingContext.try_get() is not None
    return is_tracing or callable(eval_frame.get_eval_frame_callback())


# Where Dynamo leaves a frame to Python, it would compile these on their own. Unlike a disabled
# function, a skipped one still sees whether compilation is on.
skip_code(_runners.__code__)
for _function in (is_ours, is_guarded, _innermost, _is_compiled):
    skip_code(_function.__code__)
skip_code(stand_ins.is_traced_whole.__code__)


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch's
def _run(optimizer: torch.optim.Optimizer, original: Step) -> Any:
    runner = _innermost().runner
    return original(optimizer) if runner is None else runner(optimizer, original)


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # torch's
def _begin_guarded(optimizer: torch.optim.Optimizer, given: Sequence[Any]) -> Callable[[], None]:
    guard = _innermost().guard
    assert guard is not None, "the caller has asked"
    end: Callable[[], None] = torch.compiler.disable(guard(optimizer, given))
    return end


def _run_guarded(
    optimizer: torch.optim.Optimizer, original: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a step that takes arguments; of what it calls, a closure is compiled."""
    given = (*args, *kwargs.values())
    end = _begin_guarded(optimizer, given)
    if len(given) == 1 and callable(given[0]):
        result = _run_with_closure(optimizer, original, given[0])
    else:
        result = original(optimizer, *args, **kwargs)
    end()
    return result


skip_code(_run_guarded.__code__)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of the optimizer's class for where its hooks run elsewhere."""
    step: Any = type(optimizer).step
    inner: Step = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


def runs_hooks_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step hooks may run within the step: a subclass's calls its base's, which has hooks.

    What takes the place of the step would leave those calls out.
    """
    has_hooks = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
    if not has_hooks or _is_of_torch(_code_of(type(optimizer).step)):
        return False
    steps = [vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls)]
    return any(getattr(step, "hooked", False) for step in steps[1:])


def dispatching(original: Step) -> Step:
    """Return a step that is ``original`` except where our step runs.

    A closure is part of our step: where ``original`` is torch's, it is called first, as that does.
    A step that a subclass calls as its base's is part of the subclass's own.
    """
    code = _code_of(original)
    calls_first = _is_of_torch(code) and "LBFGS" not in code.__qualname__
    own = str(id(code))  # Dynamo would make an int that is not always the same dynamic

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and is_guarded():
            return _run_guarded(self, original, args, kwargs)
        is_taken = is_ours() and stand_ins.is_own_step(self, own)
        if not is_taken or len(args) + len(kwargs) > 1 or (kwargs and "closure" not in kwargs):
            if not torch.compiler.is_compiling():
                settle(self)
            return original(self, *args, **kwargs)
        loss = None
        if args or kwargs:
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


def _code_of(step: Any) -> Any:
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _is_of_torch(step: Any) -> bool:
    return bool(step.__module__.startswith("torch.optim."))


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
        settle(optimizer)
        return original(optimizer, compiled)
    finally:
        eval_frame.set_eval_frame(callback)


skip_code(_run_with_closure.__code__)  # where it is called as it stands, ``disable`` does not
_run_with_closure = torch._dynamo.disable(_run_with_closure, recursive=False)  # Dynamo stays out


def _zero_grad_dispatching(stock: Callable[..., None]) -> Callable[..., None]:
    """Return a ``zero_grad`` that Dynamo can trace; the stock one it may not enter."""

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if stand_ins.is_traced_whole():
            stand_ins.zero_grad(self, set_to_none)
        else:
            stock(self, set_to_none)
            cleared = _innermost().cleared
            if set_to_none and cleared is not None:
                cleared(self)

    skip_code(zero_grad.__code__)  # where it is no part of a graph it runs as it stands
    zero_grad.__doc__ = stock.__doc__
    return zero_grad


def _getstate_settling(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a ``__getstate__``, for copies and pickles, that waits for true step counts."""

    @functools.wraps(stock)
    def __getstate__(self: torch.optim.Optimizer) -> dict[str, Any]:
        settle(self)
        return stock(self)

    return __getstate__


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
        getstate = _getstate_settling(torch.optim.Optimizer.__getstate__)
        torch.optim.Optimizer.__getstate__ = getstate  # type: ignore[method-assign]
        scaler_steps.install()
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
