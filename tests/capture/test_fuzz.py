"""A few random training programs; ``python -m tests.fuzz_steps`` runs as many as there is time."""

from __future__ import annotations

import pytest

from tests.fuzz_steps import check


@pytest.mark.parametrize("seed", range(6))
def test_random_program_trains_as_eager(seed: int) -> None:
    finding = check(seed, disable=["fuse-updates"])
    assert finding.kind in ("same", "rounded"), finding
