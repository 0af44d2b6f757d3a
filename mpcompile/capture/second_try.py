"""A frame that Dynamo cannot trace with values of tensors in the graph is traced as stock does it.

``.item()``, ``.tolist()`` and ``nonzero`` stay in our graphs, as symbols of Dynamo. Some code takes
none, an index of ints among slices for one, and Dynamo fails there with an error that eager does
not have. Traced again with breaks at these calls, as is torch's default, the frame goes in regions.

Private torch API, seen in 2.11 to 2.14: ``ConvertFrameAssert.__call__``, called once a frame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpcompile.capture import dynamo_api
from mpcompile.errors import MpcompileError

_AS_STOCK = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}


def install(is_ours: Callable[[], bool], note: Callable[[str, Sequence[Any]], None]) -> None:
    """Trace again while ``is_ours``, and ``note`` why; once."""
    from torch._dynamo.convert_frame import ConvertFrameAssert

    convert: Any = ConvertFrameAssert.__call__

    @functools.wraps(convert)
    def convert_or_retry(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, *args, **kwargs)
        except Exception as error:
            holds_values = torch._dynamo.config.capture_scalar_outputs
            if not (is_ours() and holds_values and _is_of_tracing(error)):
                raise
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            stack = dynamo_api.stack_of(error)
        with torch._dynamo.config.patch(_AS_STOCK):
            converted = convert(self, *args, **kwargs)
        note(f"values of tensors break the graph, since with them in it there is {text}", stack)
        return converted

    ConvertFrameAssert.__call__ = convert_or_retry  # type: ignore[method-assign]


def _is_of_tracing(error: Exception) -> bool:
    """Whether the tracer failed: it gave nothing up, and no backend and no check of ours failed."""
    from torch._dynamo import exc

    own = (exc.InternalTorchDynamoError, exc.TorchRuntimeError, exc.UserError)
    if isinstance(error, (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)):
        return isinstance(error, own)
    return not isinstance(error, MpcompileError)
