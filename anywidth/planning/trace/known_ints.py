"""Numbers that remember which attribute of a module they come from."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple


class SizeSource(NamedTuple):
    """A size is `ratio` times an attribute of a module, or times an entry of it."""

    path: str
    name: str
    place: int | None = None
    ratio: Fraction = Fraction(1)


class KnownInt(int):
    """A number that remembers the attribute it comes from, also if multiplied or divided."""

    source: SizeSource

    def __new__(cls, value: int, source: SizeSource) -> KnownInt:
        number = super().__new__(cls, value)
        number.source = source
        return number

    def __deepcopy__(self, memo: Any) -> KnownInt:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __mul__(self, other: Any) -> Any:
        return self._times(int.__mul__(self, other) if isinstance(other, int) else None, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        is_whole = isinstance(other, int) and other != 0 and int(self) % int(other) == 0
        if not is_whole:
            return int.__floordiv__(self, other)
        return self._times(int.__floordiv__(self, other), Fraction(1, int(other)), other)

    def _times(self, value: Any, by: Any, other: Any = None) -> Any:
        if value is None or value is NotImplemented:
            return NotImplemented
        if isinstance(by, KnownInt) or isinstance(other, KnownInt) or value <= 0:
            return value
        source = self.source
        return KnownInt(value, source._replace(ratio=source.ratio * Fraction(by)))
