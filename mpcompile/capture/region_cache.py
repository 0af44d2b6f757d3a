"""Keep what the passes found out about a region, so that they need not run in the next process.

AOTAutograd's cache keeps compiled code, and a hit there skips the passes. What they would have told
the report is kept here, under a key of everything that they read; and an entry there is keyed by a
token that stands in the entry here and nowhere else. So a hit never comes without its report: where
this entry is missing, the token is a new one, and the passes run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpcompile.codegen.build import private_dir
from mpcompile.config import default_cache_dir
from mpcompile.errors import CodegenError
from mpcompile.inspection.report import RegionReport
from mpcompile.pass_base import PassContext, Stage

Findings = dict[str, Any]
"""What passes wrote, by name; plain data."""

_FIELDS = (
    "kind", "draws_random", "aten_before", "ops_before", "ops_after", "casts", "decisions",
    "saved_bytes", "peak",
)  # fmt: skip
"""What passes and lowering fill in of a region's report."""

_BROKEN = (OSError, zlib.error, pickle.UnpicklingError, EOFError, AttributeError, ImportError,
           LookupError, TypeError, ValueError)  # fmt: skip


@dataclass(frozen=True)
class CacheEntry:
    """What is kept of one region.

    Attributes:
        path: its file, which may not be there yet.
        token: what AOTAutograd's entry is keyed by.
        findings: what the passes found out when the region was compiled; None if it was not.
    """

    path: Path
    token: str
    findings: Findings | None = None

    def write(self, findings: Findings) -> None:
        """Keep ``findings``; a cache that cannot be written to is none."""
        content = zlib.compress(pickle.dumps((self.token, findings)), level=1)
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as made:
                file = Path(made) / self.path.name
                file.write_bytes(content)
                os.replace(file, self.path)
        except OSError:
            return


def find_entry(text: str, cache_dir: Path | None) -> CacheEntry | None:
    """Return the entry of the region that ``text`` describes; None if there is no cache.

    Its folder is private to the user, as loading what is in it runs code.
    """
    try:
        folder = private_dir(private_dir(cache_dir or default_cache_dir()) / "regions")
    except (CodegenError, OSError):
        return None
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.pickle"
    try:
        token, findings = pickle.loads(zlib.decompress(path.read_bytes()))
    except _BROKEN:
        return CacheEntry(path, secrets.token_hex(16))
    return CacheEntry(path, token, findings)


def collect(region: RegionReport, ctx: PassContext) -> Findings:
    """Return what passes and lowering wrote of ``region``."""
    records = [record for record in region.pass_records if record.stage is not Stage.DYNAMO]
    found = {name: getattr(region, name) for name in _FIELDS}
    return {**found, "pass_records": records, "used_overrides": ctx.used_overrides}


def restore(findings: Findings, region: RegionReport, ctx: PassContext) -> None:
    """Write ``findings`` to where passes and lowering would have written them."""
    for name in _FIELDS:
        setattr(region, name, findings[name])
    region.add_passes(findings["pass_records"])
    ctx.used_overrides |= findings["used_overrides"]
    region.from_cache = True
