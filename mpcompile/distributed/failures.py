"""What to say when a collective fails: torch's own text names sockets, not causes."""

from __future__ import annotations

_SIGNS = ("gloo", "Gloo", "NCCL", "ProcessGroup", "c10d")
_ADVICE = (
    "Another rank has died, hangs, or runs another step. Look for the first error in the output of "
    "the other ranks; how long to wait for them is init_process_group(timeout=...)."
)


def describe(doing: str, error: BaseException) -> str:
    """Return the message for ``doing`` that failed with ``error``."""
    lines = str(error).strip().splitlines()
    return f"{doing} failed: {lines[0] if lines else 'no reason given'}. {_ADVICE}"


def note(error: BaseException) -> None:
    """Add our word to an error of a collective that torch runs itself."""
    text = str(error)
    said = _ADVICE in text or any(_ADVICE in known for known in getattr(error, "__notes__", ()))
    if not said and isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS):
        error.add_note(f"mpcompile: a collective of the step failed. {_ADVICE}")
