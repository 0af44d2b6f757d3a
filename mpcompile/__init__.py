"""mpcompile: mixed-precision training as a compiler pass for PyTorch.

``torch.compile(step, backend="mpcompile")`` needs no import of this package; what is here inspects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpcompile.backend import explain, last_report, load_state_dict, skipped, state_dict

__all__ = ["explain", "last_report", "load_state_dict", "skipped", "state_dict"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load public names on first use: importing the package loads neither Dynamo nor Inductor."""
    if name in __all__:
        from mpcompile import backend

        return getattr(backend, name)
    raise AttributeError(f"module 'mpcompile' has no attribute {name!r}")
