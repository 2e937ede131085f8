"""What the tasks' configurations have in common: their widths."""

from __future__ import annotations

from typing import Protocol

from anywidth.errors import AnywidthError
from anywidth.training.sampling import Rule, Sampling
from anywidth.width import WidthRange


class WidthChoices(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def divisor(self) -> int: ...
    @property
    def width(self) -> float: ...
    @property
    def widths_per_step(self) -> int: ...
    @property
    def lattice(self) -> int | None: ...


def check_widths(settings: WidthChoices, rule: Rule = "sandwich", nonuniform: bool = False) -> None:
    """Refuses widths that cannot be trained, and one that would be passed over without a word."""
    WidthRange(settings.low, settings.high, settings.divisor)
    if settings.method == "us":
        Sampling(rule, settings.widths_per_step, nonuniform, settings.lattice)
    if settings.method != "i" and settings.width != 1:
        raise AnywidthError(
            f"width={settings.width} is not read with method={settings.method!r}: leave out "
            "--width, or train a network of that one width with --method i"
        )
