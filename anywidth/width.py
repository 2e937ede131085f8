"""Widths: the range of a network, the rounding rule, and the channels of a width."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.json_values import mapped, whole

# The rounding error of a width computed as 0.25 + 30 * 0.025 or kept in single precision.
_ROUNDING = 1e-6


def round_channels(channels: float, divisor: int) -> int:
    """The nearest multiple of `divisor`, but never less than 90 % of `channels`.

    This is the rounding of the MobileNet papers (TensorFlow-slim's `make_divisible`), so that
    multiply-adds equal the published ones exactly.
    """
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    if rounded < 0.9 * channels:
        rounded += divisor
    return rounded


@dataclass(frozen=True)
class WidthRange:
    """The widths that a network can run at, as fractions of its full width.

    Args:
        low: the narrowest width, in (0, 1] (the paper's k0). It affects the accuracy of all
            widths.
        high: the widest width, at least `low` and at most 1.
        divisor: channel counts are rounded to multiples of this (the paper's d) and of the
            group's unit, such as the channels of a head. A group smaller than the least such
            multiple could never narrow; it is rounded to its unit, or to single channels. A
            group of exactly that size keeps all channels at every width. For example, 16
            channels at width 0.25 become 4 with divisor 4, stay 16 with divisor 16, and become 4
            with divisor 17.
    """

    low: float = 0.25
    high: float = 1.0
    divisor: int = 8

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= 1:
                raise AnywidthError(
                    f"{name} {value!r}: a width is a number in (0, 1], "
                    "the fraction of the full width"
                )
            object.__setattr__(self, name, float(value))
        if self.low > self.high:
            raise AnywidthError(f"low {self.low} and high {self.high}: low must not exceed high")
        object.__setattr__(self, "divisor", check_whole(self.divisor, 1, "widths: divisor"))

    def fraction(self, width: float) -> float:
        """`width` as a float in this range, without rounding errors; raises if it is outside."""
        if not is_number(width) or not 0 < width <= 1 + _ROUNDING:
            raise AnywidthError(
                f"width {width!r} is not a number in (0, 1]; give a fraction of the full width "
                f"between {self.low} and {self.high}"
            )
        if not self.low - _ROUNDING <= width <= self.high + _ROUNDING:
            end = "low" if width < self.low else "high"
            raise AnywidthError(
                f"width {width} is outside the range [{self.low}, {self.high}] of this network; "
                f"choose a width inside it, or train a network of a wider range: --{end} {width}"
            )
        return min(max(float(width), self.low), self.high)


@dataclass(frozen=True)
class ChannelConfig:
    """The number of active channels per group: a width, resolved for one network.

    It is immutable and hashable; statistics and CUDA graphs are keyed by it. Get one from
    `plan.resolve(width)`, and make a nonuniform one from it with `replace`.
    """

    channels: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        pairs = self.channels.items() if isinstance(self.channels, Mapping) else self.channels
        # JSON does not take numpy's integers, which a search may draw.
        plain = tuple((g, n if type(n) is int else whole_number(n) or n) for g, n in pairs)
        object.__setattr__(self, "channels", plain)
        object.__setattr__(self, "_lookup", dict(self.channels))
        object.__setattr__(self, "_hash", hash(self.channels))

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of strings differ between processes, so the hash is not pickled.
        return ChannelConfig, (self.channels,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelConfig:
        return self

    def __hash__(self) -> int:
        hashed: int = self.__dict__["_hash"]
        return hashed

    def __getitem__(self, group: str) -> int:
        lookup: dict[str, int] = self.__dict__["_lookup"]
        if group not in lookup:
            raise AnywidthError(f"no group {group!r} in this configuration; it has {list(lookup)}")
        return lookup[group]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.channels)

    def __len__(self) -> int:
        return len(self.channels)

    def items(self) -> tuple[tuple[str, int], ...]:
        return self.channels

    def replace(self, channels: Mapping[str, int]) -> ChannelConfig:
        """A configuration with other channel counts for some groups.

        The result is checked against a plan when it is used, not here.
        """
        for name in channels:
            self[name]
        return ChannelConfig(tuple((name, channels.get(name, n)) for name, n in self.channels))

    def to_json(self) -> dict[str, int]:
        return dict(self.channels)

    @staticmethod
    def from_json(
        data: Mapping[str, int], at: str = "a mapping from group to channels"
    ) -> ChannelConfig:
        return ChannelConfig(tuple(mapped(whole(1))(data, at).items()))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={n}" for name, n in self.channels[:3])
        more = f", … {len(self.channels) - 3} more" if len(self.channels) > 3 else ""
        return f"ChannelConfig({inside}{more})"


Width = float | ChannelConfig


def width_list(widths: object, where: str) -> list[Width]:
    """The widths given to a call, as a list; the error for a single width shows the list form."""
    if hasattr(widths, "tolist"):  # an array or tensor, such as torch.linspace gives
        widths = widths.tolist()
    if isinstance(widths, ChannelConfig | Mapping | str) or not isinstance(widths, Iterable):
        example = widths if is_number(widths) else "0.25, 0.5, 1.0"
        raise AnywidthError(
            f"{where}(widths={widths!r}): expected a list of fractions or ChannelConfigs, such as "
            f"widths=[{example}]"
        )
    found = [float(width) if is_number(width) else width for width in widths]
    if not found:
        raise AnywidthError(
            f"{where}() was given no widths: pass at least one width, such as widths=[0.25, 1.0]"
        )
    return found


def check_whole(value: object, least: int, name: str) -> int:
    """`value` as an int, if it is a whole number (also numpy's) of at least `least`."""
    found = whole_number(value)
    if found is None or found < least:
        expected = f"expected a whole number of at least {least}, such as {max(least, 4)}"
        raise AnywidthError(f"{name}={value!r}: {expected}")
    return found


def whole_number(value: object) -> int | None:
    """`value` as an int if it is a whole number (also numpy's), else None."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_whole else None  # type: ignore[call-overload]


def is_number(value: object) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, numbers.Real) and not is_bool and math.isfinite(value)
