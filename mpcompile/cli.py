"""The command ``mpcompile``: what the backend does, and whether it can work on this machine.

Exit codes: 0 all is well, 1 something needs repair, 2 the command line or an option is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tabulate import tabulate

from mpcompile.config import PASS_NAMES, Config
from mpcompile.errors import ConfigError

EXIT_OK = 0
EXIT_PROBLEM = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    arguments = _build_parser().parse_args(argv)
    try:
        if arguments.command == "passes":
            print(format_passes(Config.from_options(None)))
            return EXIT_OK
        return _run_doctor(trial=not arguments.no_trial)
    except ConfigError as error:
        print(f"mpcompile: {error}", file=sys.stderr)
        return EXIT_USAGE


def format_passes(config: Config) -> str:
    """Return the table of all passes in pipeline order, planned ones too."""
    # The pipeline loads Dynamo and Inductor; `mpcompile --help` need not wait for them.
    from mpcompile.pipeline import PIPELINE

    built = {item.name: item for item in PIPELINE}
    rows = []
    for name in PASS_NAMES:
        if name not in built:
            rows.append((name, "not yet", "", "", ""))
            continue
        item = built[name]
        state = "on" if config.is_pass_enabled(name) else "off"
        rows.append((name, state, item.stage.value, "yes" if item.exact else "no", item.off))
    return tabulate(rows, headers=("pass", "state", "stage", "exact", "switched off means"))


def _run_doctor(*, trial: bool) -> int:
    from mpcompile.doctor import diagnose, format_findings

    findings = diagnose(trial=trial)
    print(format_findings(findings))
    return EXIT_PROBLEM if any(item.problem for item in findings) else EXIT_OK


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpcompile", description="Mixed-precision training as a torch.compile backend."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("passes", help="list the compiler passes and their state")
    doctor = commands.add_parser("doctor", help="check whether mpcompile can work on this machine")
    doctor.add_argument(
        "--no-trial", action="store_true", help="leave out compiling a small training step"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
