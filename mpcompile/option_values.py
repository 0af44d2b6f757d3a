"""Parsers that turn what a user wrote into the value of an option.

A raw value is a Python object from ``options={...}`` or text from the environment. Both take the
same road, so a list may always be written ``a,b`` and a switch ``on``. A parser returns the checked
value or raises ``Mistake``, whose text says what was found and what to use; ``config.py`` adds the
place and reports all mistakes together.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

Parser = Callable[[object], object]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}
LOSS_SCALES = ("dynamic", "torch", "apex", "fairseq", "deepspeed")
FLAGS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


class Mistake(ValueError):
    """One wrong value; collected by ``Config.from_options`` and raised as ``ConfigError``."""


@dataclass(frozen=True)
class Assignment:
    """A precision assignment given by the user, as JSON text.

    Text, not the parsed value: it is hashable, and the cache key follows the contents of the file.

    Attributes:
        source: Path of the file, or ``options`` for a value handed over directly.
        text: The JSON document.
    """

    source: str
    text: str

    def load(self) -> object:
        """Return the parsed document: lists, dicts, strings and numbers."""
        document: object = json.loads(self.text)
        return document


def suggestion(word: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or a full stop."""
    by_lower = {name.lower(): name for name in known}
    text = word.strip().lower() if isinstance(word, str) else ""
    matches = difflib.get_close_matches(text, by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else "."


def join_or(words: tuple[str, ...]) -> str:
    """Return ``a, b or c``."""
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def not_yet(what: str, advice: str) -> Mistake:
    """Return the refusal of something planned: ``advice`` is what to do meanwhile."""
    return Mistake(f"{what} is not yet built. {advice}.")


def parse_dtype(raw: object) -> torch.dtype:
    """Take a name or a ``torch.dtype``."""
    dtype = DTYPES.get(raw.strip().lower()) if isinstance(raw, str) else raw
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        hint = suggestion(raw, DTYPES)
        raise Mistake(
            f"{raw!r} is no dtype to train in{hint} "
            "Use bfloat16 (bf16), float16 (fp16) or float32 (fp32)."
        )
    return dtype


def parse_wire_dtype(raw: object) -> torch.dtype | None:
    """Take a name or a ``torch.dtype``, or None for that of the step."""
    if raw is None:
        return None
    dtype = DTYPES.get(raw.strip().lower()) if isinstance(raw, str) else raw
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        hint = suggestion(raw, DTYPES)
        raise Mistake(f"{raw!r} is no dtype to send in{hint} Use float16, bfloat16 or float32.")
    return dtype


def parse_check_sync(raw: object) -> str | int:
    """Take ``first-step``, ``off``, or every how many steps."""
    text = raw.strip() if isinstance(raw, str) else raw
    if text in ("first-step", "off"):
        return str(text)
    try:
        return parse_count(text)
    except Mistake as mistake:
        raise Mistake(
            f"{raw!r} does not say when to compare. Use first-step, off, or a whole number above 0."
        ) from mistake


def choice(values: tuple[str, ...], planned: tuple[str, ...] = ()) -> Parser:
    """Build a parser that takes one of ``values`` and refuses the ``planned`` ones by name."""
    advice = f"Use {join_or(values)}"

    def parse(raw: object) -> str:
        text = raw.strip() if isinstance(raw, str) else ""
        if text in planned:
            raise not_yet(repr(text), advice)
        if text not in values:
            raise Mistake(f"{raw!r} is unknown{suggestion(raw, (*values, *planned))} {advice}.")
        return text

    return parse


def parse_names(raw: object) -> tuple[str, ...]:
    """Split ``a,b`` or take a list or tuple of names; duplicates and blanks go, order stays."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise Mistake(f"{raw!r} is not a list of names. Use a list of str, or one str 'a,b'.")
    return tuple(dict.fromkeys(item.strip() for item in items if item.strip()))


def pass_names(known: tuple[str, ...], planned: tuple[str, ...] = ()) -> Parser:
    """Build a parser for a list of pass names, each one of ``known``.

    Args:
        known: Accepted names.
        planned: Names refused as not yet built.
    """

    def parse(raw: object) -> tuple[str, ...]:
        names = parse_names(raw)
        every = (*known, *planned)
        unknown = [
            f"{name!r} is no pass{suggestion(name, every)}" for name in names if name not in every
        ]
        if unknown:
            raise Mistake(f"{' '.join(unknown)} The passes are {', '.join(every)}.")
        early = [name for name in names if name in planned]
        if early:
            raise not_yet(", ".join(early), f"Built are {', '.join(known)}")
        return names

    return parse


def parse_flag(raw: object) -> bool:
    """Take a bool, or on/off, true/false, 1/0 as text."""
    flag = FLAGS.get(raw.strip().lower()) if isinstance(raw, str) else raw
    if not isinstance(flag, bool):
        raise Mistake(f"{raw!r} is not a switch. Use True or False (on or off in the environment).")
    return flag


def parse_count(raw: object) -> int:
    """Take a whole number above 0."""
    text = raw.strip() if isinstance(raw, str) else ""
    count = int(text) if text.isdecimal() else raw
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise Mistake(f"{raw!r} is not a count. Use a whole number above 0.")
    return count


def parse_optional(parse: Parser) -> Parser:
    """Build a parser that takes None, or ``none`` as text, beside what ``parse`` takes."""

    def parse_or_none(raw: object) -> object:
        is_none = raw is None or (isinstance(raw, str) and raw.strip().lower() == "none")
        return None if is_none else parse(raw)

    return parse_or_none


def parse_power_of_two(raw: object) -> float:
    """Take a power of two from 2**-126 to 2**126, as a number or as text (``1024``, ``2**-14``)."""
    value = _number(raw) if isinstance(raw, str) else raw
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not _is_power_of_two(float(value)):  # type: ignore[arg-type]  # checked
        raise Mistake(f"{raw!r} is no power of two from 2**-126 to 2**126. Use 1024 or 2**-14.")
    return float(value)  # type: ignore[arg-type]  # checked above


def _number(text: str) -> float | None:
    base, power, exponent = text.partition("**")
    try:
        return 2.0 ** int(exponent) if power and base.strip() == "2" else float(text)
    except (ValueError, OverflowError):
        return None


def _is_power_of_two(value: float) -> bool:
    mantissa, exponent = math.frexp(value)
    return mantissa == 0.5 and -126 <= exponent - 1 <= 126


def parse_loss_scale(raw: object) -> str | float:
    """Take the name of a policy, or a power of two for a scale that stays."""
    name = raw.strip().lower() if isinstance(raw, str) else ""
    if name in LOSS_SCALES:
        return name
    try:
        return parse_power_of_two(raw)
    except Mistake:
        hint = suggestion(raw, LOSS_SCALES)
        raise Mistake(
            f"{raw!r} is no loss scale{hint} Use {join_or(LOSS_SCALES)}, or a power of two."
        ) from None


def parse_path(raw: object) -> Path | None:
    """Take a path, which need not exist, or None; ``~`` is expanded."""
    if raw is None:
        return None
    text = os.fspath(raw) if isinstance(raw, os.PathLike) else raw
    if not isinstance(text, str) or not text.strip():
        raise Mistake(f"{raw!r} is not a path. Use a str or a path object, or None.")
    return Path(text).expanduser()


def parse_assignment(raw: object) -> Assignment | None:
    """Take a loaded JSON value, or read a file now: a broken one is then among the mistakes."""
    if isinstance(raw, (list, dict)):
        try:
            return Assignment("options", json.dumps(raw, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise Mistake(
                f"the assignment is not JSON: {error}. Use str, numbers and lists."
            ) from error
    path = parse_path(raw)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Mistake(
            f"cannot read {str(path)!r}: {reason}. Use the path of a JSON file."
        ) from error
    except ValueError as error:
        raise Mistake(f"{str(path)!r} is not JSON: {error}. Write it from a report.") from error
    return Assignment(str(path), text)
