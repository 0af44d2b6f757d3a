"""Read back a precision assignment that a report wrote."""

from __future__ import annotations

from collections.abc import Mapping

from mpcompile.config import Config
from mpcompile.errors import ConfigError
from mpcompile.precision import Precision

Assigned = Mapping[int, Mapping[str, str]]

_PRECISIONS = tuple(precision.value for precision in Precision)


def read_assignment(config: Config) -> Assigned:
    """Return precision by region and node name, empty if the user gave none.

    Raises:
        ConfigError: entries are malformed; all of them are listed.
    """
    if config.assignment is None:
        return {}
    document = config.assignment.load()
    if not isinstance(document, list):
        raise ConfigError(
            f"assignment {config.assignment.source}: holds a {type(document).__name__}, not a list "
            "of entries. Write one with mpcompile.last_report(step).save_assignment(path)."
        )
    mistakes: list[str] = []
    assigned: dict[int, dict[str, str]] = {}
    for index, entry in enumerate(document):
        found = _mistake(entry)
        if found:
            mistakes.append(f"entry {index}: {found}")
        else:
            assigned.setdefault(entry["region"], {})[entry["node"]] = entry["precision"]
    if mistakes:
        listing = "".join(f"\n  - {mistake}" for mistake in mistakes)
        raise ConfigError(f"assignment {config.assignment.source}:{listing}")
    return assigned


def _mistake(entry: object) -> str:
    if not isinstance(entry, dict):
        return f"{entry!r} is not an object with region, node and precision"
    if not isinstance(entry.get("region"), int) or not isinstance(entry.get("node"), str):
        return f"region must be a number and node a name, found {entry!r}"
    if entry.get("precision") not in _PRECISIONS:
        return f"precision {entry.get('precision')!r} is none of {', '.join(_PRECISIONS)}"
    return ""
