"""What people write in steps, in float16: it trains, and no graph reads a value on the host."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from mpcompile.backend import last_report, skipped
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
from tests.capture.patterns.registry import PATTERNS
from tests.programs import Program, Raised, run
from tests.steps import compile_step

_MODULES = (  # register their patterns
    *(calls, carried, clipping, closures, gradients, habits, hooks, models),
    *(node_hooks, optimizer_reads, optimizers, python_state),
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
READ = "_local_scalar_dense"
REFUSED = "value_returned_for_another_backward"
"""A backward outside the step, whose update nobody could skip; the error says so."""
SKIPS = {"clip_unless_nonfinite", "scaler_of_the_user"}
"""Their third batch is not finite, and they skip it themselves."""
TOLERANCE = {"closure_of_lbfgs": 0.2}
"""It divides by differences of gradients; the others stay within a hundredth."""


def parameters(program: Program) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([p.detach().double().flatten() for p in program.model.parameters()])


@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - {REFUSED}))
def test_pattern_in_float16_learns_and_reads_nothing_on_the_host(name: str) -> None:
    """With a scale at which no step is skipped."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for options in ({"dtype": "float32"}, {"dtype": "float16", "loss_scale": 256}):
            torch.manual_seed(0)
            program = PATTERNS[name]()
            compiled = compile_step(program.step, disable="fuse-updates", **options)
            results = [seen["result"] for seen in run(program, compiled, 3)]
            skips = options["dtype"] == "float16" and name in SKIPS
            assert bool(skipped(compiled)) == skips
            found.append((parameters(program), [isinstance(r, Raised) for r in results]))
    (wanted, raised), (ours, ours_raised) = found
    assert ours_raised == raised
    assert (ours - wanted).norm() <= TOLERANCE.get(name, 0.01) * wanted.norm()
    regions = last_report(compiled).regions
    reads = [(r.aten_before.count(READ), r.aten_after.count(READ)) for r in regions]
    assert all(after <= before for before, after in reads)  # those that the program asks for
