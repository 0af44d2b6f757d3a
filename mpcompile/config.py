"""The options of the backend: one frozen ``Config`` per compiled step.

Every option is one field of ``Config`` that carries its parser and its meaning, so the checks, the
environment variables and the printed option table cannot drift apart. This is the only file that
reads environment variables. What is planned but not built is refused by name, never ignored: a
setting that does nothing is the hardest mistake to find.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch

from mpcompile.errors import ConfigError
from mpcompile.option_conflicts import find_conflicts
from mpcompile.option_values import (
    Assignment,
    Mistake,
    Parser,
    choice,
    parse_assignment,
    parse_check_sync,
    parse_count,
    parse_dtype,
    parse_flag,
    parse_loss_scale,
    parse_names,
    parse_optional,
    parse_path,
    parse_power_of_two,
    parse_wire_dtype,
    pass_names,
    suggestion,
)

KILL_SWITCH = "MPCOMPILE"
PREFIX = "MPCOMPILE_"

PASS_NAMES = (
    "cast-composites",
    "assign-precision",
    "insert-casts",
    "scale-loss",
    "fold-casts",
    "align-matmuls",
    "bucket-allreduce",
    "shadow-weights",
    "fuse-updates",
)
BUILT_PASSES = (
    "cast-composites",
    "assign-precision",
    "insert-casts",
    "scale-loss",
    "fold-casts",
    "bucket-allreduce",
    "fuse-updates",
)
PLANNED_PASSES = tuple(name for name in PASS_NAMES if name not in BUILT_PASSES)


class OptionRow(NamedTuple):
    """One line of the option table, as text."""

    name: str
    values: str
    default: str
    meaning: str


class _Setting(NamedTuple):
    """One thing the user set."""

    name: str
    word: str
    origin: str
    raw: object


@dataclass(frozen=True)
class _Option:
    """What the checks and the option table know about one field of ``Config``."""

    parse: Parser
    values: str
    meaning: str
    in_key: bool


def _option(parse: Parser, values: str, meaning: str, *, in_key: bool = True) -> dict[str, _Option]:
    """Describe a field of ``Config``; ``in_key`` is False if it changes no generated graph."""
    return {"option": _Option(parse, values, meaning, in_key)}


def _choice(
    meaning: str, *values: str, planned: tuple[str, ...] = (), in_key: bool = True
) -> dict[str, _Option]:
    text = ", ".join(values) + (f" (not yet: {', '.join(planned)})" if planned else "")
    return _option(choice(values, planned), text, meaning, in_key=in_key)


@dataclass(frozen=True)
class Config:
    """What the user asked for, checked.

    Build it with ``from_options``; ``Config()`` is the same as no options and no environment. What
    an option means stands beside its field and is what ``option_rows`` returns. Hashable.
    """

    dtype: torch.dtype = field(
        default=torch.bfloat16,
        metadata=_option(
            parse_dtype,
            "bfloat16, float16, float32, short bf16, fp16, fp32",
            "The dtype that eligible ops compute in; float32 inserts no casts.",
        ),
    )
    table: str = field(
        default="painted",
        metadata=_choice(
            "Which ops are eligible: our own table, or what torch.autocast does on CUDA or CPU.",
            *("painted", "autocast-cuda", "autocast-cpu"),
            planned=("apex-o1", "grappler"),
        ),
    )
    keep_fp32: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            parse_names,
            "list of aten.op, module.path.*, file.py:line, node name",
            "Ops that stay in float32; the most specific entry wins.",
        ),
    )
    keep_half: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            parse_names,
            "list as for keep_fp32",
            "Ops that compute in `dtype` although the table keeps them in float32.",
        ),
    )
    assignment: Assignment | None = field(
        default=None,
        metadata=_option(
            parse_assignment,
            "path of a JSON file, or the loaded list or dict",
            "A whole precision assignment, as a report writes it.",
        ),
    )
    disable: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            pass_names(PASS_NAMES), "list of pass names", "Passes to leave out, by exact name."
        ),
    )
    enable: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            pass_names(BUILT_PASSES, PLANNED_PASSES),
            "list of pass names",
            "Passes to run, by exact name; those that are built run anyway.",
        ),
    )
    lowering: str = field(
        default="inductor",
        metadata=_choice(
            "What runs the rewritten graphs: generated kernels, or each op as it stands.",
            *("inductor", "eager"),
        ),
    )
    mode: str = field(
        default="default",
        metadata=_choice(
            "Inductor's mode; torch.compile(mode=...) sets it too.",
            *("default", "reduce-overhead", "max-autotune"),
        ),
    )
    capture: str = field(
        default="whole",
        metadata=_choice(
            "What is one graph: the whole training step if it can be, or each piece of it.",
            *("whole", "regions"),
        ),
    )
    grads: str = field(
        default="keep",
        metadata=_choice(
            "Whether a step that clears `.grad` first leaves it to the user afterwards.",
            *("keep", "drop"),
        ),
    )
    check: str = field(
        default="first-step",
        metadata=_choice(
            "When a step that was captured whole is replayed eagerly in float32 and compared.",
            *("first-step", "off", "always"),
            in_key=False,
        ),
    )
    loss_scale: str | float = field(
        default="dynamic",
        metadata=_option(
            parse_loss_scale,
            "dynamic, power of two, torch, apex, fairseq, deepspeed",
            "float16: how the loss is scaled; a number is kept, 1 leaves scaling to you.",
            in_key=False,
        ),
    )
    growth_interval: int | None = field(
        default=None,
        metadata=_option(
            parse_optional(parse_count),
            "whole number, or None",
            "Good steps before the loss scale doubles; None: as `loss_scale` has it (2000).",
            in_key=False,
        ),
    )
    scale_floor: float | None = field(
        default=None,
        metadata=_option(
            parse_optional(parse_power_of_two),
            "power of two, or None",
            "Smallest loss scale; None: as `loss_scale` has it (2**-14).",
            in_key=False,
        ),
    )
    scale_ceiling: float | None = field(
        default=None,
        metadata=_option(
            parse_optional(parse_power_of_two),
            "power of two, or None",
            "Largest loss scale; None: as `loss_scale` has it (2**24).",
            in_key=False,
        ),
    )
    hysteresis: int | None = field(
        default=None,
        metadata=_option(
            parse_optional(parse_count),
            "whole number, or None",
            "Overflows before the loss scale halves; None: as `loss_scale` has it (1).",
            in_key=False,
        ),
    )
    wire_dtype: torch.dtype | None = field(
        default=None,
        metadata=_option(
            parse_wire_dtype,
            "float16, bfloat16, float32, short fp16, bf16, fp32, or None",
            "The dtype of gradients between DDP ranks; None: that of `dtype`.",
        ),
    )
    error_feedback: bool = field(
        default=False,
        metadata=_option(
            parse_flag,
            "False, True",
            "Whether what the cast to `wire_dtype` rounds off is added to the next gradients.",
        ),
    )
    check_sync: str | int = field(
        default="first-step",
        metadata=_option(
            parse_check_sync,
            "first-step, off, whole number above 0",
            "After which steps DDP ranks compare their parameters: the first, none, every n-th.",
            in_key=False,
        ),
    )
    verify_graph: bool = field(
        default=False,
        metadata=_option(
            parse_flag,
            "False, True",
            "Verify the graph after every pass: well formed, dtypes true, visible ones unchanged.",
            in_key=False,
        ),
    )
    max_recompiles: int = field(
        default=64,
        metadata=_option(
            parse_count,
            "whole number above 0",
            "How often one function may be compiled anew before it runs eagerly, in float32.",
            in_key=False,
        ),
    )
    cache_dir: Path | None = field(
        default=None,
        metadata=_option(
            parse_path,
            "folder, or None",
            "Cache of kernels and what passes did; None: mpcompile below the user's cache folder.",
            in_key=False,
        ),
    )
    report_dir: Path | None = field(
        default=None,
        metadata=_option(
            parse_path, "folder, or None", "Where graphs and reports are written.", in_key=False
        ),
    )

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, object] | None,
        mode: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Check everything the user set and return it.

        Args:
            options: ``torch.compile(options=...)``; wins over the environment.
            mode: ``torch.compile(mode=...)``.
            environ: Stands for ``os.environ``, whose ``MPCOMPILE_<OPTION>`` variables are read. A
                variable set to the empty string counts as unset.

        Raises:
            ConfigError: One error with every mistake of the call.
        """
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                f"options={options!r} is not a dict. Use options={{'dtype': 'bf16'}}."
            )
        settings = _collect(options or {}, mode, os.environ if environ is None else environ)
        values: dict[str, object] = {}
        mistakes = []
        for setting in settings:
            try:
                values[setting.name] = _parse(setting)
            except Mistake as mistake:
                mistakes.append(f"{setting.origin}: {mistake}")
        mistakes += find_conflicts(values, options or {}, mode)
        if mistakes:
            raise ConfigError(_format_mistakes(mistakes, settings))
        return cls(**values)  # type: ignore[arg-type]  # each parser returns its field's type

    def is_pass_enabled(self, name: str) -> bool:
        """Whether the pass called ``name`` is to run."""
        return name not in self.disable and name not in PLANNED_PASSES

    def cache_key(self) -> str:
        """Return text that differs when the generated graphs may differ; stable across processes.

        Toggles enter as the passes that are on, an assignment as a hash of its text.
        """
        passes = ",".join(name for name in BUILT_PASSES if self.is_pass_enabled(name))
        parts = [f"passes={passes}"]
        for name, option in _options().items():
            value = getattr(self, name)
            if not option.in_key or name in ("disable", "enable"):
                continue
            if isinstance(value, Assignment):
                value = hashlib.sha256(value.text.encode()).hexdigest()
            parts.append(f"{name}={value!r}")
        return ";".join(parts)


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return where built kernels are kept if ``cache_dir`` is not set.

    That is a folder of the user's below ``XDG_CACHE_HOME``, or else in the temporary folder.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "mpcompile"
    return Path(tempfile.gettempdir()) / f"mpcompile-{getpass.getuser()}"


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch ``MPCOMPILE=0`` is set.

    Raises:
        ConfigError: The variable holds anything but 0, 1 or nothing.
    """
    value = (os.environ if environ is None else environ).get(KILL_SWITCH, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"environment {KILL_SWITCH}={value!r} is not a switch. Use {KILL_SWITCH}=0 to compile "
            f"as stock Inductor does, and {KILL_SWITCH}=1 or nothing for mpcompile."
        )
    return value == "0"


def environment_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the set variables that reach mpcompile, kill switch included, sorted by name."""
    source = os.environ if environ is None else environ
    names = (name for name in source if name == KILL_SWITCH or name.startswith(PREFIX))
    return {name: source[name] for name in sorted(names) if source[name].strip()}


def option_rows() -> list[OptionRow]:
    """Return the option table, in the order of the fields."""
    return [
        OptionRow(spec.name, option.values, _format_default(spec.default), option.meaning)
        for spec, option in zip(fields(Config), _options().values(), strict=True)
    ]


def _format_default(value: object) -> str:
    return "none" if value == () else str(value).removeprefix("torch.")


def _options() -> dict[str, _Option]:
    return {spec.name: spec.metadata["option"] for spec in fields(Config)}


def _collect(
    options: Mapping[str, object], mode: str | None, environ: Mapping[str, str]
) -> list[_Setting]:
    """Return what was set; of an option set twice only the explicit setting."""
    settings = [_Setting(name, name, f"options[{name!r}]", raw) for name, raw in options.items()]
    if mode is not None and "mode" not in options:
        settings.append(_Setting("mode", "mode", "torch.compile(mode=...)", mode))
    explicit = {setting.name for setting in settings}
    for variable, text in environment_settings(environ).items():
        name = variable.removeprefix(PREFIX).lower()
        if variable != KILL_SWITCH and name not in explicit:
            settings.append(_Setting(name, variable, f"environment {variable}", text))
    return settings


def _parse(setting: _Setting) -> object:
    options = _options()
    if setting.name in options:
        return options[setting.name].parse(setting.raw)
    known = tuple(options)
    if setting.word != setting.name:
        known = tuple(PREFIX + name.upper() for name in known)
    raise Mistake(f"{setting.word!r} is no option{suggestion(setting.word, known)}")


def _format_mistakes(mistakes: list[str], settings: list[_Setting]) -> str:
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    lines = "".join(f"\n  - {mistake}" for mistake in mistakes)
    known = _options()
    unknown = any(setting.name not in known for setting in settings)
    listing = f"\nThe options are {', '.join(known)}." if unknown else ""
    return f"{count} in the options of backend 'mpcompile':{lines}{listing}"
