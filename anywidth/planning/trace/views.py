"""How channels pass through a reshape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anywidth.planning.held_numbers import (
    held_numbers,
    is_feature_count,
    is_number_of_heads,
    is_size_of_head,
)
from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.known_ints import SizeSource
from anywidth.planning.trace.solver import Pieces, TracedAxis, Unsplittable, scaled
from anywidth.planning.trace.trace_findings import Follower
from anywidth.planning.trace.value import Traced

# An axis that a merge repeats more often than this is fixed.
MOST_PIECES = 1024
# Each needs a rehearsal; more are not worth the time.
MOST_GUESSES = 4
# Reshapes without sizes as arguments.
SIZED_BY_TORCH = ("flatten", "squeeze")


def reshape(cursor: Cursor, value: Traced, shape: Sequence[int], rest: int | None = None) -> Traced:
    """Match old and new dimensions in blocks of equal size.

    `rest` is the dimension that the code gives as -1.
    """
    misreading = cursor.misreading
    if misreading is not None and misreading.times > MOST_GUESSES:
        cursor.fix(value, _hidden(cursor))
    inside = shape[1:] if shape[:1] == value.shape[:1] else shape
    is_sized = sum(n > 1 for n in inside) > 1 or rest == 0
    if not cursor.is_batched:  # a parameter, whose first dimension is no batch
        is_sized |= any(n > 1 for i, n in enumerate(shape) if i != rest)
    if cursor.op not in SIZED_BY_TORCH and is_sized:
        cursor.guess()
    axes: list[TracedAxis] = []
    old = new = 0
    while new < len(shape):
        olds, news = [], [new]
        new += 1
        have, want = 1, shape[news[0]]
        while have != want or have == 0:
            if have < want and old < len(value.shape):
                have *= value.shape[old]
                olds.append(old)
                old += 1
            elif have > want and new < len(shape):
                want *= shape[new]
                news.append(new)
                new += 1
            else:
                break
        axes += _block(cursor, value, olds, {i: shape[i] for i in news}, rest).values()
    return cursor.output(axes)


def _block(
    cursor: Cursor,
    value: Traced,
    olds: Sequence[int],
    sizes: Mapping[int, int],
    rest: int | None,
) -> dict[int, TracedAxis]:
    """The axes of the new dimensions, given by their sizes, that some old dimensions become."""
    solver, misreading = cursor.solver, cursor.misreading
    kept = [i for i in olds if value.shape[i] > 1]
    elastic = [i for i in kept if value.axes[i] is not None]
    constant: dict[int, TracedAxis] = dict.fromkeys(sizes)
    count = len(elastic)
    if len(elastic) > 1:  # it has met no channels, so it is not one of theirs
        elastic = [i for i in elastic if not cursor.found.is_fresh(value.axes[i])]
    repeats = len(elastic) < count
    if len(elastic) > 1:
        cursor.found.merged += [value.axes[i] for i in elastic]
        for i in elastic[1:]:  # whole heads may narrow, not the channels of each as well
            solver.fix(value.axes[i], f"merged with other channels by {cursor.place}")
    if not elastic:
        return constant
    axis = solver.pieces(value.axes[elastic[0]])
    outer = math.prod(value.shape[i] for i in kept if i < elastic[0])
    inner = math.prod(value.shape[i] for i in kept if i > elastic[0])
    if len(axis) * outer > MOST_PIECES:
        solver.fix(axis, f"repeated {outer} times by {cursor.place}")
        return constant
    merged = tuple((variable, m * inner) for variable, m in axis) * outer
    wide = [i for i, size in sizes.items() if size > 1]
    if len(wide) > 1 and cursor.found.is_fresh(axis):
        solver.fix(axis, _hidden(cursor))
        return constant
    if len(wide) == 1:
        if not repeats:  # otherwise the attribute may be how often channels are repeated
            _follow_attribute(cursor, merged, wide[0], sizes[wide[0]])
        return {**constant, wide[0]: merged}
    known = wide.index(misreading.dim) if misreading and misreading.dim in wide else None
    within = None if known is None else _within_groups(cursor, merged, [sizes[i] for i in wide])
    most = 1 if within is None else 2
    if misreading is not None and (misreading.dim is None or misreading.times > most):
        solver.fix(axis, _hidden(cursor))
        return constant
    if within is not None and misreading is not None and misreading.times == 1:
        place, found, name = within
        cursor.bind(Follower(cursor.layer, name, found or (), is_tried=True))
        return {**constant, wide[place]: found}
    left = wide.index(rest) if rest in wide else None
    place, found = _split(cursor, merged, {i: sizes[i] for i in wide}, known, left)
    return {**constant, wide[place]: found}


def _within_groups(
    cursor: Cursor, axis: Pieces, sizes: Sequence[int]
) -> tuple[int, TracedAxis, str] | None:
    """The dimension that must narrow because all groups of an axis do, and its number.

    In a rehearsal the number of groups changed, because the module keeps the size of a group.
    """
    narrow = _as_it_is(cursor, axis, sizes, range(1, len(sizes)))
    names = [] if narrow is None else cursor.sized_by(sizes[narrow[0]])
    return (*narrow, names[0]) if narrow is not None and names else None


def _as_it_is(
    cursor: Cursor, axis: Pieces, sizes: Sequence[int], places: Iterable[int]
) -> tuple[int, TracedAxis] | None:
    """The dimension that the present structure of the axis fits, and what it is made of."""
    for place in places:
        before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
        part = cursor.solver.repeated_part(axis, before)
        is_block = part is not None and cursor.solver.size(part) == sizes[place] * after
        if part is not None and is_block and all(m % after == 0 for _, m in part):
            return place, tuple((variable, m // after) for variable, m in part)
    return None


def _hidden(cursor: Cursor) -> str:
    return (
        f"reshaped by {cursor.place} to a number that stays or that Python worked out (better: -1, "
        "x.shape, or an attribute of the module)"
    )


def _follow_attribute(cursor: Cursor, axis: Pieces, dim: int, size: int) -> None:
    """Try the module's attributes of this size one after the other; fix the axis if none works.

    The size did not change in a rehearsal, so the module must keep it as a number.
    """
    source, misreading = cursor.source(dim), cursor.misreading
    # Of a parameter, this may be something else that has the attribute's size.
    if source is not None and cursor.is_batched and misreading is None and not cursor.failures:
        return cursor.follow(source, axis)
    names = sorted(cursor.sized_by(size), key=is_feature_count)
    guesses = [source] if source is not None and not cursor.is_batched else []
    guesses += [SizeSource(cursor.layer, name) for name in names]
    tried: list[SizeSource | None] = [None, *dict.fromkeys(guesses)]
    if misreading is None:
        guess = cursor.next_guess(tried)
    elif misreading.dim == dim:
        guess = None
    elif misreading.times < len(tried):
        guess = tried[misreading.times]
    else:
        return cursor.solver.fix(axis, _hidden(cursor))
    if guess is not None:
        cursor.follow(guess, axis)
    return None


def _split(
    cursor: Cursor, axis: Pieces, dims: Mapping[int, int], known: int | None, rest: int | None
) -> tuple[int, TracedAxis]:
    """Which of the new dimensions narrows, and what it is made of.

    In this order: the result of a rehearsal; the present structure of the axis, if it decides; a
    number of heads that the module has under a known name; the dimension given as -1, unless it is
    the last; the largest dimension (the other dimension of a shuffle is its number of groups, that
    of a pixel shuffle its scale), but of two attributes the first, which counts heads.
    """
    solver, sizes = cursor.solver, list(dims.values())
    # Where channels stay anyway, an attribute may be something else.
    sources = [cursor.source(dim) if solver.is_open(axis) else None for dim in dims]
    decided = _as_it_is(cursor, axis, sizes, range(len(sizes)) if known is None else [known])
    if decided is not None:
        _follow_source(cursor, sources[decided[0]], decided[1])
        return decided
    # Not a dimension inside a unit, such as the entries of a window, nor the channels of each head.
    blocks = [math.prod(sizes[i:]) for i in range(len(sizes))]
    whole = [i for i, block in enumerate(blocks) if any(m % block for _, m in axis)]
    of_heads = {i for i, s in enumerate(sources) if s is not None and is_size_of_head(s.name)}
    whole = [i for i in whole if i not in of_heads]
    whole = whole or list(range(len(sizes)))
    likely = max(whole, key=lambda i: (sizes[i], i))
    if rest is not None and rest < len(sizes) - 1:
        likely = rest
    elif sources[likely] is not None:
        likely = next(i for i in whole if sources[i] is not None)
    names: Names = ()
    place = known
    if place is None and cursor.is_stuck:
        first = _guess(cursor, sizes, likely)[0]
        others = (i for i in range(len(sizes)) if i != first)
        place = max(others, key=lambda i: (i in of_heads, sizes[i], i))
    elif place is None:
        place, names = _guess(cursor, sizes, likely)
    before, after = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
    try:
        parts = solver.cut(axis, [sizes[place] * after] * before)
    except Unsplittable:
        solver.fix(axis, cursor.uneven)
        return place, None
    found = solver.new(sizes[place])
    if known is None:
        cursor.found.cuts[cursor.node] = found
    for part in parts:
        cursor.unify(part, scaled(found, after))
    for name, times in names:
        cursor.bind(Follower(cursor.layer, name, scaled(found, times) or ()))
    if not names:
        _follow_source(cursor, sources[place], found)
    return place, found


def _follow_source(cursor: Cursor, source: SizeSource | None, axis: TracedAxis) -> None:
    """Let the attribute that a dimension comes from follow it, unless that was tried."""
    if source is not None and not cursor.failures and cursor.misreading is None:
        cursor.follow(source, axis)


# Attributes, and how many times the size of a dimension each of them is.
Names = tuple[tuple[str, int], ...]


def _guess(cursor: Cursor, sizes: Sequence[int], likely: int) -> tuple[int, Names]:
    """The next guess: which dimension narrows, and the attributes that follow it.

    Numbers of heads that the module keeps come first, then the likely dimension, then the others.
    """
    guesses: list[tuple[int, Names]] = [*_heads(cursor, sizes)]
    guesses += [(i, ()) for i in [likely, *range(len(sizes))] if (i, ()) not in guesses]
    return cursor.next_guess(guesses) or guesses[0]


def _heads(cursor: Cursor, sizes: Sequence[int]) -> Iterator[tuple[int, Names]]:
    """Dimensions, except the last, whose size the module has as its number of heads.

    At last together with its other numbers of heads: those of queries are several times those of
    keys, and the code may divide one by the other.
    """
    held = held_numbers(cursor.module).items()
    heads = {name: number for name, number in held if is_number_of_heads(name)}
    found = {
        name: max(i for i in range(len(sizes) - 1) if sizes[i] == number)
        for name, number in heads.items()
        if number in sizes[:-1]
    }
    yield from ((place, ((name, 1),)) for name, place in found.items())
    for place in dict.fromkeys(found.values()):
        size = sizes[place]
        together = tuple((name, n // size) for name, n in heads.items() if n % size == 0 < n)
        if len(together) > 1:
            yield place, together
