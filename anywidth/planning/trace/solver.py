"""Which sizes must be equal: variables for stretches of channels, which rules merge and split.

An axis is a tuple of (variable, multiplicity) pairs: a variable of n units with multiplicity m
stands for n * m entries of the axis, m neighbours for each unit. `None` is an axis that never
changes. Narrowing a variable to its first k units narrows the stretch to its first k * m entries.

Merging and splitting replaces variables. An axis with replaced variables stays valid: `pieces`
returns its present variables, and code that looks inside an axis calls it first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

Pieces = tuple[tuple[int, int], ...]
TracedAxis = Pieces | None


class Unsplittable(Exception):
    """A cut falls inside a unit."""


def scaled(axis: TracedAxis, times: int) -> TracedAxis:
    """The axis in which each entry has become `times` neighbouring entries."""
    return None if axis is None else tuple((variable, m * times) for variable, m in axis)


class Solver:
    def __init__(self) -> None:
        self._units: list[int] = []
        self._became: dict[int, Pieces] = {}
        self._fixed: dict[int, str] = {}

    def new(self, units: int, fixed: str | None = None) -> Pieces:
        """A new axis of one new variable."""
        self._units.append(units)
        variable = len(self._units) - 1
        if fixed is not None:
            self._fixed[variable] = fixed
        return ((variable, 1),)

    def pieces(self, axis: TracedAxis) -> Pieces:
        """The axis in present variables; an empty tuple for a constant axis."""
        result: list[tuple[int, int]] = []
        for variable, multiplicity in axis or ():
            if variable in self._became:
                parts = self._became[variable] = self.pieces(self._became[variable])
                result += [(part, m * multiplicity) for part, m in parts]
            else:
                result.append((variable, multiplicity))
        return tuple(result)

    def variables(self, axes: Iterable[TracedAxis]) -> set[int]:
        return {variable for axis in axes for variable, _ in self.pieces(axis)}

    def units(self, variable: int) -> int:
        return self._units[variable]

    def size(self, axis: TracedAxis) -> int:
        return sum(self._units[variable] * m for variable, m in self.pieces(axis))

    def repeated_part(self, axis: TracedAxis, times: int) -> TracedAxis:
        """The part that an axis repeats `times` times; None if the axis is no such repetition."""
        pieces = self.pieces(axis)
        part = pieces[: len(pieces) // times]
        return part if part and pieces == part * times else None

    def fixed(self, variable: int) -> str | None:
        """The reason why a variable never narrows; None if it can."""
        return self._fixed.get(variable)

    def is_open(self, axis: TracedAxis) -> bool:
        """Whether any part of an axis can narrow."""
        return any(self.fixed(variable) is None for variable, _ in self.pieces(axis))

    def fix(self, axis: TracedAxis, reason: str) -> None:
        """Keep every channel of an axis; the first reason that was given counts."""
        for variable, _ in self.pieces(axis):
            self._fixed.setdefault(variable, reason)

    def unify(
        self, first: TracedAxis, second: TracedAxis, reason: str, uneven: str = "cut inside a unit"
    ) -> TracedAxis:
        """Make two axes of one size shrink together.

        `reason` is used if one of them is constant, `uneven` if a unit of one begins inside a unit
        of the other.
        """
        if first is None or second is None:
            self.fix(first, reason)
            self.fix(second, reason)
            return None
        left, right = self.pieces(first), self.pieces(second)
        while left and right:
            (a, m), (b, n) = left[0], right[0]
            size_a, size_b = self._units[a] * m, self._units[b] * n
            try:
                if size_a < size_b:
                    self._cut(b, n, size_a)
                elif size_b < size_a:
                    self._cut(a, m, size_b)
                else:
                    left, right = left[1:], right[1:]
                    self._merge(a, m, b, n)
            except Unsplittable:
                self.fix(first, uneven)
                self.fix(second, uneven)
                return None
            # Both may have replaced a variable that occurs again further on.
            left, right = self.pieces(left), self.pieces(right)
        return first

    def cut(self, axis: TracedAxis, sizes: Sequence[int]) -> list[Pieces]:
        """The axis in consecutive parts of the given sizes; may split variables in two.

        If a cut falls inside a unit, Unsplittable is raised and nothing is changed.
        """
        self._check_cuts(axis, sizes)
        parts: list[Pieces] = []
        rest = self.pieces(axis)
        for size in sizes:
            part: list[tuple[int, int]] = []
            while size > 0:
                variable, m = rest[0]
                length = self._units[variable] * m
                if length > size:
                    self._cut(variable, m, size)
                    rest = self.pieces(rest)
                    continue
                part.append(rest[0])
                rest = rest[1:]
                size -= length
            parts.append(tuple(part))
        return parts

    def ends(self, axis: TracedAxis) -> set[int]:
        """Where the pieces of an axis end."""
        return set(itertools.accumulate(self._units[v] * m for v, m in self.pieces(axis)))

    def _check_cuts(self, axis: TracedAxis, sizes: Sequence[int]) -> None:
        edges = set(itertools.accumulate(sizes))
        start = 0
        for variable, m in self.pieces(axis):
            end = start + self._units[variable] * m
            if any(start < edge < end and (edge - start) % m for edge in edges):
                raise Unsplittable
            start = end

    def _cut(self, variable: int, multiplicity: int, size: int) -> None:
        """Replace a variable by two; the first has `size` entries at this multiplicity."""
        if size % multiplicity:
            raise Unsplittable
        reason = self._fixed.get(variable)
        head = self.new(size // multiplicity, reason)
        tail = self.new(self._units[variable] - size // multiplicity, reason)
        self._became[variable] = head + tail

    def _merge(self, a: int, m: int, b: int, n: int) -> None:
        if a == b:
            return
        reason = self._fixed.get(a) or self._fixed.get(b)
        common = math.lcm(m, n)
        merged = self.new(self._units[a] * m // common, reason)
        self._became[a] = ((merged[0][0], common // m),)
        self._became[b] = ((merged[0][0], common // n),)
