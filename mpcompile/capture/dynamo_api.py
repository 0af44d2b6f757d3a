"""Dynamo's private interfaces that tell which ``torch.compile`` call is running.

A named backend is wrapped in ``torch._TorchCompileWrapper``, which is wrapped in
``repro.after_dynamo.WrapBackendDebug``. Dynamo enters ``backend_ctx_ctor`` of the outermost wrapper
around each call, and that wrapper copies instance attributes only, so a property hands ours on.
Written against torch 2.11 to 2.14; goes when a backend can ask for the call that it serves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import torch

from mpcompile.runtime import dispatch

_DDP_FILE = "/torch/nn/parallel/distributed.py"
_INSIDE = ("/site-packages/torch/", dispatch.__file__)
"""Parts of the names of files that are torch's or ours."""
_DDP_REASON = "DistributedDataParallel runs between graphs"

ContextCtor = Callable[[], AbstractContextManager[Any]]


_GUARDS = (
    {}
    if torch.__version__ >= "2.13"  # a TorchVersion compares as versions do
    else {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
    }
)
"""Where a parameter that is frozen or unfrozen goes unnoticed by the tags of the dict it is in."""


def tracing_patcher(recompile_limit: int, whole: bool) -> Callable[[], Callable[[], None]]:
    """Return a function that sets how Dynamo traces in this thread and returns its undoing.

    ``whole`` has it trace ``backward()``. ``.item()`` and ``nonzero`` stay in the graph: what
    stands between two breaks on them would run eagerly, in fp32. Hooks that a module gets after
    compilation are called. Recurrent layers become one op each (``remedies.recurrent_layers``).
    A model inside DDP is one graph: DDPOptimizer would cut it at every bucket, refuses
    checkpointing, and gives float32 values at each cut.
    ``config.patch`` does the same at ten times the price, which each call of a step would pay.
    """
    patcher: Callable[[], Callable[[], None]] = torch._dynamo.config._make_closure_patcher(
        recompile_limit=recompile_limit,
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        trace_autograd_ops=whole,
        allow_rnn=True,
        skip_nnmodule_hook_guards=False,
        optimize_ddp=False,
        **_GUARDS,
    )
    return patcher


UNNAMED = "step_unsupported"
"""What Dynamo says of a break at an instruction that has no handler for breaks."""


class GraphBreak(NamedTuple):
    """Why one graph ended before the frame did."""

    reason: str
    line: str


def install_context(
    build: Callable[[dict[str, Any]], ContextCtor], is_ours: Callable[[Any], bool]
) -> None:
    """Let Dynamo enter a context of ours around each call of a function compiled with our backend.

    Args:
        build: from the keyword arguments of the backend (``mode``, ``options``) to a constructor of
            contexts; called once per ``torch.compile``.
        is_ours: whether a backend function is ours.
    """
    from torch._dynamo.eval_frame import null_context
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    def context_of(wrapper: Any) -> Any:
        if "_mpcompile_ctor" not in vars(wrapper):
            inner = wrapper._torchdynamo_orig_backend
            if is_ours(getattr(inner, "compiler_fn", inner)):
                ctor: Any = build(getattr(inner, "kwargs", {}))
                _make_unequal(inner)
            else:
                ctor = getattr(inner, "backend_ctx_ctor", null_context)
            wrapper._mpcompile_ctor = ctor
        return wrapper._mpcompile_ctor

    WrapBackendDebug.backend_ctx_ctor = property(context_of)  # type: ignore[attr-defined]


def _make_unequal(wrapper: Any) -> None:
    """Keep a second ``torch.compile`` of one function from running the first one's graphs.

    Dynamo shares compiled code between backends that compare equal: same function, same ``mode``
    and ``options``. But each call has a session and a report, and may see another environment.
    """
    if hasattr(wrapper, "compiler_fn"):
        wrapper.compiler_fn = functools.partial(wrapper.compiler_fn)


def current_frame() -> int | None:
    """Return Dynamo's number of the function that is being traced, or None."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def traced_line() -> str:
    """Return ``file.py:12`` of the line that is being traced, or ''."""
    stack = list(torch._guards.TracingContext.extract_stack())
    return f"{stack[0].filename.rsplit('/', 1)[-1]}:{stack[0].lineno}" if stack else ""


def refused(reason: str, stack: Sequence[Any] = ()) -> GraphBreak:
    """Return the break that we make for ``reason`` at ``stack``, or else where the trace is now."""
    stack = stack or list(torch._guards.TracingContext.extract_stack())
    return GraphBreak(f"mpcompile: {reason}", _users_line(stack, or_any=True))


def stack_of(error: BaseException) -> list[Any]:
    """Return Python's stack where Dynamo raised ``error``, if its ``real_stack`` says."""
    return list(getattr(error, "real_stack", None) or ())


def given_up(code: CodeType, reason: str, stack: Sequence[Any]) -> GraphBreak | None:
    """Return what a frame was given up for; None for one of torch's or ours, or never begun."""
    line = _users_line(stack, or_any=False)
    if not line or any(part in code.co_filename for part in _INSIDE):
        return None
    return GraphBreak(f"given up, runs eagerly: {reason}", line)


def num_compilations() -> int:
    """Return how often the function that is being traced was compiled before."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return (compile_id.frame_compile_id or 0) if compile_id is not None else 0


def is_tracing() -> bool:
    """Whether Dynamo or a backend is at work in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def restart_tracing(reason: str) -> NoReturn:
    """Have Dynamo trace the current function again from its start.

    A backend may ask for it with this one exception only, whatever its name says. The log of
    decisions goes too: Dynamo insists that a second trace takes the same branches.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from tracing what a backend returned."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


class Call(NamedTuple):
    """One call of a compiled function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def current_call() -> Call | None:
    """Return the call that Dynamo has just entered our context for, or None if it is not found.

    A context is not told of the call, so it is read from the frame of ``compile_wrapper``.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    if frame is None or not {"fn", "args", "kwargs"} <= frame.f_locals.keys():
        return None
    return Call(*(frame.f_locals[name] for name in ("fn", "args", "kwargs")))


def context_ctor_of(compiled: Any) -> Any:
    """Return the constructor that Dynamo enters around calls of ``compiled``, or None.

    Args:
        compiled: what ``torch.compile`` returned, a bound method of such, or a module that
            ``module.compile()`` compiled in place.
    """
    from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext

    if isinstance(compiled, OptimizedModule):
        return compiled.dynamo_ctx._backend_ctx_ctor
    if isinstance(compiled, torch.nn.Module):  # compiled in place by ``module.compile()``
        compiled = compiled._compiled_call_impl
    function = getattr(compiled, "__func__", compiled)
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _TorchDynamoContext):
            return cell.cell_contents._backend_ctx_ctor
    return None


def original_of(compiled: Any) -> Any:
    """Return the function or module that was compiled, or ``compiled`` itself if none was."""
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(compiled, OptimizedModule):
        return compiled._orig_mod
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def break_of(gm: torch.fx.GraphModule) -> GraphBreak | None:
    """Return why Dynamo ended the graph ``gm``, or None if its frame returned."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _format_break(reason)


def num_breaks() -> int:
    """How many graph breaks Dynamo has noted so far; a position for ``breaks_since``."""
    from torch._dynamo.output_graph import graph_break_reasons

    return len(graph_break_reasons)


def breaks_since(position: int) -> list[GraphBreak]:
    """Return the graph breaks that Dynamo noted after ``num_breaks()`` gave ``position``."""
    from torch._dynamo.output_graph import graph_break_reasons

    found = [_format_break(reason) for reason in graph_break_reasons[position:]]
    ours = (dispatch.BREAK_REASON, dispatch.CLEARED_REASON)
    return [item for item in found if item.line or item.reason not in ours]


def _format_break(reason: Any) -> GraphBreak:
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    stack = list(reason.user_stack)
    text = lines[0] if lines else ""
    if stack and stack[-1].filename == dispatch.__file__:
        is_zero_grad = any(f.name == "zero_grad" for f in stack if f.filename == dispatch.__file__)
        text = dispatch.CLEARED_REASON if is_zero_grad else dispatch.BREAK_REASON
    elif any(frame.filename.endswith(_DDP_FILE) for frame in stack):
        text = _DDP_REASON
    is_ours = text in (dispatch.BREAK_REASON, dispatch.CLEARED_REASON)
    return GraphBreak(text, _users_line(stack, not is_ours))


def _users_line(stack: Sequence[Any], or_any: bool) -> str:
    """Return ``file.py:12`` of the innermost frame that is not torch's or ours."""
    frames = [f for f in stack if not any(part in f.filename for part in _INSIDE)]
    if not frames and or_any:
        frames = list(stack)
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
