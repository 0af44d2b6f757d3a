"""How a loss scale changes: the constants of the systems that people come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpcompile.config import Config

_LEAST, _MOST = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class ScalePolicy:
    """A scale starts at ``initial``, doubles and halves, and stays within its bounds.

    Attributes:
        initial: the first scale.
        growth_interval: steps without overflow before it doubles.
        floor: the smallest scale.
        ceiling: the largest scale.
        hysteresis: overflows before it halves; it has patience again when it has doubled.
        is_static: the scale stays as it is.
    """

    initial: float = 65536.0
    growth_interval: int = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    hysteresis: int = 1
    is_static: bool = False

    @classmethod
    def from_config(cls, config: Config, num_ranks: int = 1) -> ScalePolicy:
        """Return the policy that the options ask for, on ``num_ranks`` ranks."""
        if isinstance(config.loss_scale, float):
            return cls(initial=config.loss_scale, is_static=True)
        policy = PRESETS[config.loss_scale]
        if config.loss_scale == "fairseq":  # whose interval is one of samples
            policy = replace(policy, growth_interval=max(policy.growth_interval // num_ranks, 1))
        given = {
            "growth_interval": config.growth_interval,
            "floor": config.scale_floor,
            "ceiling": config.scale_ceiling,
            "hysteresis": config.hysteresis,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        policy = replace(policy, **changes)  # type: ignore[arg-type]  # by name
        return replace(policy, initial=min(max(policy.initial, policy.floor), policy.ceiling))

    def __str__(self) -> str:
        """Return one line for reports."""
        if self.is_static:
            return "kept"
        bounds = f"{_power(self.floor)} to {_power(self.ceiling)}"
        patience = f", halves at overflow {self.hysteresis}" if self.hysteresis > 1 else ""
        return f"{bounds}, doubles after {self.growth_interval} good steps{patience}"


def _power(value: float) -> str:
    return f"2**{int(value).bit_length() - 1 if value >= 1 else 1 - int(1 / value).bit_length()}"


# torch 2.14 GradScaler; the last apex amp; fairseq's command line (whose floor of 1e-4 lies between
# two powers of two); DeepSpeed's JSON defaults. Ours are torch's with bounds.
PRESETS: Mapping[str, ScalePolicy] = {
    "dynamic": ScalePolicy(),
    "torch": ScalePolicy(floor=_LEAST, ceiling=_MOST),
    "apex": ScalePolicy(floor=_LEAST),
    "fairseq": ScalePolicy(initial=2.0**7, growth_interval=2**14, floor=2.0**-13, ceiling=_MOST),
    "deepspeed": ScalePolicy(growth_interval=1000, floor=1.0, ceiling=_MOST, hysteresis=2),
}
