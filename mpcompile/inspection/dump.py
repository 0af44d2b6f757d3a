"""Write the graphs of a region to files, one a pass, for ``options={"report_dir": ...}``."""

from __future__ import annotations

from pathlib import Path

from mpcompile.inspection.report import GraphPrints, RegionReport


def dump_region(region: RegionReport, folder: Path) -> None:
    """Write every print of ``region`` below ``folder``, which is made if it is missing.

    Files are called ``region0-aten-0-before.txt``, ``region0-aten-1-assign-precision.txt`` and so
    on, in the order of the passes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stages: tuple[tuple[str, GraphPrints], ...] = (
        ("dynamo", region.dynamo_graph),
        ("aten", region.graph),
    )
    for stage, prints in stages:
        texts = [("before", prints.before)]
        texts += [(record.name, record.after) for record in prints.passes]
        for index, (name, text) in enumerate(texts):
            path = folder / f"region{region.index}-{stage}-{index}-{name}.txt"
            path.write_text(text + "\n")
