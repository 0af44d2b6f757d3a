"""A few random training programs; ``python -m tests.fuzz_steps`` runs as many as there is time."""

from __future__ import annotations

import pytest

from tests.fuzz_steps import check

# A warning that is an error here would end Dynamo's trace, not the eager step.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("seed", range(6))
def test_random_program_trains_as_eager(seed: int) -> None:
    finding = check(seed, disable=["fuse-updates"])
    assert finding.kind in ("same", "rounded", "noise"), finding
