"""Numbers that remember which attribute of a module they come from."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple


class SizeSource(NamedTuple):
    """A size is `ratio` times an attribute of a module, or times an entry of it."""

    path: str
    name: str
    place: int | None = None
    ratio: Fraction = Fraction(1)


class _Known:
    """A number that remembers an attribute in copies too; pickled, it is a plain one."""

    source: SizeSource

    def __new__(cls, value: Any, source: SizeSource) -> Any:
        number = super().__new__(cls, value)  # type: ignore[call-arg]
        number.source = source
        return number

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        plain: Any = int if isinstance(self, int) else float
        return plain, (plain(self),)


class KnownInt(_Known, int):
    """A number that remembers the attribute it comes from, also if multiplied or divided."""

    def __mul__(self, other: Any) -> Any:
        return self._times(int.__mul__(self, other) if isinstance(other, int) else None, other)

    __rmul__ = __mul__

    def __pow__(self, other: Any, *rest: Any) -> Any:
        is_float = isinstance(other, float)
        number = float(self) ** other if is_float else int.__pow__(self, other, *rest)
        return _known(number, self.source)

    def __floordiv__(self, other: Any) -> Any:
        is_whole = isinstance(other, int) and other != 0 and int(self) % int(other) == 0
        if not is_whole:
            return int.__floordiv__(self, other)
        return self._times(int.__floordiv__(self, other), Fraction(1, int(other)), other)

    def _times(self, value: Any, by: Any, other: Any = None) -> Any:
        if value is None or value is NotImplemented:
            is_float = isinstance(by, float)
            return _known(float(self) * by, self.source) if is_float else NotImplemented
        if isinstance(by, KnownInt) or isinstance(other, KnownInt) or value <= 0:
            return value
        source = self.source
        return KnownInt(value, source._replace(ratio=source.ratio * Fraction(by)))


class KnownFloat(_Known, float):
    """A number that was worked out from an attribute: its root, say."""


def _known(value: Any, source: SizeSource) -> Any:
    """A result that remembers where it comes from; others, such as tensors, are left alone."""
    return KnownFloat(value, source) if type(value) is float else value


def _remembering(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: _known(plain(self, *others), self.source)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow",
              "neg"):  # fmt: skip
    setattr(KnownFloat, f"__{_name}__", _remembering(getattr(float, f"__{_name}__")))
for _name in ("__truediv__", "__rtruediv__"):
    setattr(KnownInt, _name, _remembering(getattr(int, _name)))
