"""The two ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two ranks over Gloo, started when a test first asks."""
    found = Ranks()
    yield found
    found.stop()
