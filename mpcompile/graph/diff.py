"""Compare two prints of a graph: which ops came and went, and the text between them."""

from __future__ import annotations

import difflib
import re
from collections import Counter

_OP = re.compile(r"^%\S+: (.+?) = ([\w.\[\]]+)")


def op_counts(text: str) -> Counter[str]:
    """Count ops in a print, inputs excluded: ``{"aten.mm": 12, ...}``."""
    found = (_OP.match(line) for line in text.splitlines())
    names = (match.group(2) for match in found if match)
    return Counter(name for name in names if name != "placeholder")


def format_diff(before: str, after: str, context: int = 1) -> str:
    """Return a unified diff of two prints behind a line of op counts that changed.

    Returns '' if both are equal.
    """
    if before == after:
        return ""
    old, new = op_counts(before), op_counts(after)
    changed = [
        f"{name} {old[name]} -> {new[name]}"
        for name in sorted(old.keys() | new.keys())
        if old[name] != new[name]
    ]
    head = f"ops: {', '.join(changed) or 'same ops, other types'}"
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=context
    )
    return "\n".join([head, *lines])
