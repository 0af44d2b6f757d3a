"""``torch.backends.cudnn.flags`` as a context manager, which Dynamo cannot trace.

Without CUDA in use there is nothing for the flags to act on.

Written against torch 2.11 to 2.14; goes when Dynamo traces the flags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mpcompile.capture.dynamo_handlers import trace_instead


def install() -> None:
    """Leave the flags alone, in steps that are traced whole, while CUDA is not in use."""
    trace_instead(torch.backends.cudnn.flags, _no_flags, lambda: not torch.cuda.is_initialized())


@contextlib.contextmanager
def _no_flags(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
