"""What holds for every test: a clean Dynamo, a fixed seed, verified graphs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

_GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what is produced"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a check of text against a file of ``tests/golden``."""

    def check(name: str, text: str) -> None:
        path = _GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; see CONTRIBUTING.md on --update-golden"

    return check


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
