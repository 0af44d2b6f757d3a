"""What is said once the first call of a step is over, if it did nothing of what was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Set

from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.report import StepReport

_STACKLEVEL = 6  # the line of the call, behind three frames of torch


def warn_after_first_call(report: StepReport, used_overrides: Set[str], has_given_up: bool) -> None:
    """Warn if nothing was compiled, nothing is trained, or an override names nothing.

    Args:
        report: of the step, after its first call.
        used_overrides: the patterns of ``keep_fp32`` and ``keep_half`` that named something.
        has_given_up: whether Dynamo ran a function eagerly as a whole.
    """
    regions = report.regions
    if not regions and (has_given_up or not report.updates):
        found = "; ".join(f"{reason} ({line})" for reason, line in report.breaks)
        warnings.warn(
            "mpcompile: the first call compiled nothing, so all of it ran eagerly as written. "
            f"{found or 'Dynamo found no tensor computation in it'}. Compile a function that "
            "computes on tensors; give the body of a loop around backward() its own function.",
            stacklevel=_STACKLEVEL,
        )
    trains = any(region.kind is GraphKind.TRAINING for region in regions)
    if regions and not trains and all(region.grad_enabled for region in regions):
        warnings.warn(
            "mpcompile: the first call compiled no backward: none of its graphs reads a tensor "
            "that requires grad, so nothing is trained. Check that parameters have "
            "requires_grad=True and that the step calls loss.backward(); compile evaluation "
            "under torch.no_grad().",
            stacklevel=_STACKLEVEL,
        )
    patterns = (*report.config.keep_fp32, *report.config.keep_half)
    unused = [pattern for pattern in patterns if pattern not in used_overrides]
    if unused and regions:
        warnings.warn(
            f"mpcompile: {', '.join(unused)} in keep_fp32 or keep_half names nothing in the "
            "graphs of the step. Print mpcompile.last_report(step) for the modules, lines, ops "
            "and nodes there are.",
            stacklevel=_STACKLEVEL,
        )
