"""What people write in steps: each pattern trains as eager does, whole or, with a reason, not."""

from __future__ import annotations

import pytest

from mpcompile.backend import last_report
from tests.capture.patterns import (
    calls,
    carried,
    clipping,
    closures,
    gradients,
    habits,
    hooks,
    models,
    node_hooks,
    optimizer_reads,
    optimizers,
    python_state,
)
from tests.capture.patterns.registry import IN_REGIONS, PATTERNS, TOLERANCE
from tests.programs import compare

_MODULES = (  # register their patterns
    *(calls, carried, clipping, closures, gradients, habits, hooks, models),
    *(node_hooks, optimizer_reads, optimizers, python_state),
)
# A warning that is an error here would end Dynamo's trace, not the eager step.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FUSED = (
    "zero_grad_first",
    "accumulation_across_calls",
    "clip_by_norm_with_visible_gradients",
    "hooks_of_an_optimizer_that_calls_the_step_of_its_base",
)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_pattern_trains_as_eager_to_the_last_bit(name: str) -> None:
    tolerance = TOLERANCE.get(name, 0.0)
    found, compiled = compare(PATTERNS[name], tolerance=tolerance, disable=["fuse-updates"])
    assert found == []
    breaks = last_report(compiled).breaks
    assert bool(breaks) == (name in IN_REGIONS), breaks
    assert all(line for _, line in breaks)


@pytest.mark.parametrize("name", FUSED)
def test_pattern_with_fused_updates_stays_within_rounding(name: str) -> None:
    found, _ = compare(PATTERNS[name], tolerance=2e-6)
    assert found == []
