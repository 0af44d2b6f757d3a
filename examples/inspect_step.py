"""Look at what mpcompile does to a training step, switch parts of it off, compare the results.

``mpcompile.explain`` runs one step on copies: the model, its optimizer and the random state are as
before afterwards, so it can be called on a step that is about to train::

    python examples/inspect_step.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import mpcompile
from mpcompile.errors import ConfigError
from mpcompile.inspection.report import RegionReport, StepReport
from mpcompile.inspection.tables import format_bytes

Step = Callable[[Tensor, Tensor], Tensor]

VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"disable": ["fold-casts"]},
    {"disable": ["assign-precision"]},
    {"keep_fp32": ["model.readout"]},
    {"keep_fp32": ["aten.gelu"]},
    {"table": "autocast-cuda"},
    {"dtype": "float32"},
)


class Classifier(nn.Module):
    """An MLP with a norm; a temperature is computed in fp32 because the user says so."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.hidden = nn.Linear(128, 128)
        self.readout = nn.Linear(128, 16)
        self.temperature = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, 16)``."""
        x = self.norm(F.gelu(self.read_in(x)))
        x = x + F.gelu(self.hidden(x))
        temperature = self.temperature(x).float().exp()  # .float() pins: exp reads fp32
        logits: Tensor = self.readout(x) / (1 + temperature)
        return logits


def build_step() -> Step:
    """Return a plain fp32 training step."""
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def training_region(report: StepReport) -> RegionReport:
    """Return the graph that holds forward and backward."""
    return max(report.regions, key=lambda region: sum(region.ops_after.matmul_flops.values()))


def show_passes(region: RegionReport) -> None:
    """Print what each pass left behind, and what the last one changed."""
    rows = [
        (record.name, record.rewrites, len(record.after.splitlines()))
        for record in region.graph.passes
    ]
    print(tabulate(rows, headers=["after pass", "rewrites", "lines of the graph"]))
    print("\nThe first lines of the graph as traced, then after insert-casts:\n")
    for text in (region.graph.before, region.graph.after_pass("insert-casts")):
        compute = [line for line in text.splitlines() if "placeholder" not in line]
        print("\n".join(compute[:8]), end="\n...\n\n")
    print("What fold-casts changed:\n")
    print(region.graph.diff("fold-casts"))


def compare_options(step: Step, x: Tensor, labels: Tensor) -> None:
    """Explain the same step under different options and print one row for each."""
    rows = []
    for variant in VARIANTS:
        report = mpcompile.explain(step, x, labels, options=variant)
        region = training_region(report)
        rows.append(
            (
                ", ".join(f"{name}={value}" for name, value in variant.items()) or "(defaults)",
                len(region.casts),
                f"{region.ops_after.half_share() or 0:.0%}",
                " + ".join(f"{format_bytes(n)} {t}" for t, n in sorted(region.saved_bytes.items())),
            )
        )
    headers = ["options", "casts", "16-bit matmul FLOPs", "saved for backward"]
    print(tabulate(rows, headers=headers))


def show_reasons(region: RegionReport, limit: int) -> None:
    """Print why the first nodes compute in the precision they do."""
    rows = [(d.node, d.op, d.precision, d.line, d.reason) for d in region.decisions[:limit]]
    print(tabulate(rows, headers=["node", "op", "precision", "line", "reason"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Explain one step in five ways."""
    parser = argparse.ArgumentParser(description="Look at what mpcompile does to a training step.")
    parser.add_argument("--batch-size", type=int, default=32, help="rows (default: 32)")
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    step = build_step()
    x = torch.randn(arguments.batch_size, 64)
    labels = torch.randint(16, (arguments.batch_size,))
    report = mpcompile.explain(step, x, labels)
    region = training_region(report)

    print(f"1. The report\n\n{report}")
    print("\n2. Why each node has its precision (the first 20)\n")
    show_reasons(region, limit=20)
    print("\n3. Between the passes\n")
    show_passes(region)
    print("\n4. The same step under other options\n")
    compare_options(step, x, labels)
    print("\n5. A mistake in the options is named, with the right values\n")
    try:
        mpcompile.explain(step, x, labels, options={"disable": ["fold-cast"], "dtype": "bf17"})
    except ConfigError as error:
        print(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
