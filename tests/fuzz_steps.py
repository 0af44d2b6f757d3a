"""Hold random training programs to eager: ``python -m tests.fuzz_steps --programs 500 --seed 0``.

Prints a line for each program that differs, fails or was refused, with the seed that makes it again
(``--programs 1 --seed N``), then how many there were of each kind.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from mpcompile.backend import last_report
from tests.fuzzing.steps import Choices, random_program
from tests.programs import compare, sensitivity

CALLS = 4
ROUNDING = 4e-6
"""Differences up to this are rounding, relative to the largest value of a tensor."""
NOISE = 100.0
"""How much larger a difference may be than what a rounding makes of the eager run."""
_REFUSED = ("Trying to backward through the graph a second time", "mpcompile:")
"""Marks of errors that say what a user is to change."""


@dataclass(frozen=True)
class Finding:
    """What came of one program: same, rounded, noise, differs, refused or fails.

    Clipping inside an update adds up norms in the order of the groups, which may round otherwise.
    Noise is what differs no more than between two eager runs that begin a rounding apart.
    """

    seed: int
    kind: str
    details: tuple[str, ...] = ()
    whole: bool = False


def check(seed: int, **options: Any) -> Finding:
    """Run the program of ``seed`` eagerly and compiled."""
    torch._dynamo.reset()
    try:
        found, compiled = compare(lambda: random_program(seed), CALLS, **options)
    except Exception as error:  # noqa: BLE001  # a fuzzer goes on
        text = f"{type(error).__name__}: {error}"
        notes = "\n".join(getattr(error, "__notes__", ()))
        is_refused = any(mark in text + notes for mark in _REFUSED)
        return Finding(seed, "refused" if is_refused else "fails", (text[:1500],))
    whole = not last_report(compiled).breaks
    if not found:
        return Finding(seed, "same", whole=whole)
    return Finding(seed, _kind(seed, found), tuple(found), whole)


def _kind(seed: int, found: list[str]) -> str:
    if any(mark in text for text in found for mark in _REFUSED):
        return "refused"
    if not all(" apart" in text for text in found):
        return "differs"
    if max(map(_distance, found)) < ROUNDING:
        return "rounded"
    expected: dict[str, float] = {}
    for text in sensitivity(lambda: random_program(seed), CALLS):
        if " apart" in text:
            name = _name(text)
            expected[name] = max(expected.get(name, 0.0), _distance(text))
    is_noise = all(_distance(t) < ROUNDING + NOISE * expected.get(_name(t), 0.0) for t in found)
    return "noise" if is_noise else "differs"


def _name(text: str) -> str:
    """Return ``call 1: 0.weight`` of a line that tells of a difference."""
    return text.rsplit(": ", 1)[0]


def _distance(text: str) -> float:
    return float(text.split(" apart")[0].split()[-1])


def main() -> int:
    """Run the fuzzer; return how many programs differ or fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--fused", action="store_true", help="with fuse-updates on")
    args = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    disable: list[str] = [] if args.fused else ["fuse-updates"]
    counts: Counter[str] = Counter()
    start = time.time()
    for seed in range(args.seed, args.seed + args.programs):
        finding = check(seed, disable=disable, check="off")
        counts[finding.kind] += 1
        counts["whole"] += finding.whole
        if finding.kind not in ("same", "rounded", "noise"):
            print(f"seed {seed}: {finding.kind} {Choices.draw(Random(seed))}", flush=True)
            for line in finding.details[:6]:
                print(f"    {line}", flush=True)
    print(f"seeds {args.seed} to {args.seed + args.programs - 1}: {dict(counts)}")
    print(f"{time.time() - start:.0f} s")
    return counts["differs"] + counts["fails"]


if __name__ == "__main__":
    raise SystemExit(main())
