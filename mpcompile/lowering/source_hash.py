"""Hash our own sources: part of cache keys, so that a changed pass is a cache miss."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path


@functools.cache
def source_hash(root: Path) -> str:
    """Return a hash of every Python file below ``root``, names included, links followed."""
    digest = hashlib.sha256()
    paths = [
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
