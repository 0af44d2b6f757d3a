"""What holds for every test: a clean Dynamo, a fixed seed, verified graphs."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
import torch


def _reset_dynamo() -> None:
    # Looked up, not imported: a test that compiles nothing does not pay for loading Dynamo.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def isolated_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from the same state in every test and leave no compiled code behind.

    ``MPCOMPILE_VERIFY_GRAPH`` switches the graph verifier on between all passes; other
    ``MPCOMPILE`` variables of the caller are left alone, so that a run can be steered.
    """
    monkeypatch.setenv("MPCOMPILE_VERIFY_GRAPH", "1")
    num_threads = torch.get_num_threads()
    random.seed(0)
    torch.manual_seed(0)
    _reset_dynamo()
    yield
    _reset_dynamo()
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
