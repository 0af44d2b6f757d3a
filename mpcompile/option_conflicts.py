"""Settings that are right by themselves and make no sense together.

Each finding is one line for the user: which options, what they would do together, what to change.
``config.py`` reports them with the other mistakes of the call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_SCALE_OPTIONS = ("loss_scale", "growth_interval", "scale_floor", "scale_ceiling", "hysteresis")


def find_conflicts(
    values: Mapping[str, object], options: Mapping[str, object], mode: str | None
) -> list[str]:
    """Return the mistakes that only two settings together make.

    Args:
        values: Every option that was set, by name, as its parser returned it.
        options: ``torch.compile(options=...)`` as the user wrote it.
        mode: ``torch.compile(mode=...)``.
    """
    mistakes = []
    for first, second in (("disable", "enable"), ("keep_fp32", "keep_half")):
        one, other = values.get(first, ()), values.get(second, ())
        assert isinstance(one, tuple)
        assert isinstance(other, tuple)
        both = ", ".join(name for name in one if name in other)
        if both:
            mistakes.append(f"{first} and {second}: both name {both}. Keep one of the two.")
    mistakes += _scale_conflicts(values)
    mistakes += _drop_conflicts(values)
    if mode is not None and options.get("mode", mode) != mode:
        found = f"torch.compile(mode={mode!r}) and options['mode']={options['mode']!r}"
        mistakes.append(f"{found}: two modes. Keep one.")
    return mistakes


def _drop_conflicts(values: Mapping[str, object]) -> list[str]:
    """Return a mistake if gradients are to be dropped where nobody sees the update."""
    disabled = values.get("disable", ())
    assert isinstance(disabled, tuple)
    is_seen = values.get("capture", "whole") == "whole" or "fuse-updates" not in disabled
    if values.get("grads") != "drop" or is_seen:
        return []
    return ["grads='drop': in regions without fuse-updates the update is just a graph. Enable it."]


def _scale_conflicts(values: Mapping[str, object]) -> list[str]:
    """Return settings of the loss scale that would do nothing, or that exclude each other."""
    given = [name for name in _SCALE_OPTIONS if name in values]
    dtype = values.get("dtype", torch.bfloat16)
    if given and dtype is not torch.float16:
        text = str(dtype).removeprefix("torch.")
        return [f"{', '.join(given)}: only float16 needs a loss scale, dtype is {text}. Leave out."]
    tuned = [name for name in given if name != "loss_scale" and values[name] is not None]
    if tuned and isinstance(values.get("loss_scale"), float):
        return [f"{', '.join(tuned)}: a loss_scale that is a number never changes. Leave out."]
    floor, ceiling = values.get("scale_floor"), values.get("scale_ceiling")
    if isinstance(floor, float) and isinstance(ceiling, float) and floor > ceiling:
        return [f"scale_floor={floor:g} is above scale_ceiling={ceiling:g}. Swap them."]
    return []
