"""The widths that a governor chooses from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anywidth_runtime.contents import Width
from anywidth_runtime.errors import RequestError


@dataclass(frozen=True)
class Choice:
    """A width on the menu.

    Args:
        width: as for `net.run`.
        milliseconds: measured time of one run.
        accuracy: higher is better; None if it was not measured, in which case wider counts as
            better.
    """

    width: Width
    milliseconds: float
    accuracy: float | None = None


def make_menu(
    choices: Iterable[Choice],
    *,
    least_width: float | None = None,
    least_accuracy: float | None = None,
) -> tuple[Choice, ...]:
    """The useful choices, from the fastest to the best.

    A width that takes as long as a better one is left out; this happens with channel counts that
    are not multiples of 8 or 16. So are widths that are too narrow or not accurate enough.
    """
    offered = list(choices)
    if not offered:
        raise RequestError("no widths to choose from: expected at least one")
    allowed = [one for one in offered if _is_allowed(one, least_width, least_accuracy)]
    if not allowed:
        raise RequestError(_nothing_left(offered, least_width, least_accuracy))
    has_accuracy = all(one.accuracy is not None for one in allowed)
    # Equally good: the faster one comes first and excludes the others.
    by_quality = sorted(
        allowed,
        key=lambda one: (one.accuracy if has_accuracy else _number(one), -one.milliseconds),
        reverse=True,
    )
    kept: list[Choice] = []
    for one in by_quality:
        if not kept or one.milliseconds < kept[-1].milliseconds:
            kept.append(one)
    return tuple(reversed(kept))


def _number(choice: Choice) -> float:
    """The order of widths without accuracy; named configurations are ordered by time."""
    return choice.width if isinstance(choice.width, float | int) else choice.milliseconds


def _is_allowed(choice: Choice, least_width: float | None, least_accuracy: float | None) -> bool:
    if least_width is not None and not (
        isinstance(choice.width, float | int) and choice.width >= least_width
    ):
        return False
    if least_accuracy is None:
        return True
    return choice.accuracy is not None and choice.accuracy >= least_accuracy


def _nothing_left(
    offered: list[Choice], least_width: float | None, least_accuracy: float | None
) -> str:
    if least_accuracy is not None:
        known = [one.accuracy for one in offered if one.accuracy is not None]
        best = f"the best is {max(known):g}" if known else "no accuracy is known"
        return (
            f"no width is left with an accuracy of at least {least_accuracy:g}: {best}. Ask for "
            "less, or export a bundle of widths that reach it"
        )
    widest = max((one.width for one in offered if isinstance(one.width, float | int)), default=None)
    return (
        f"no width is left from {least_width:g} up: the widest is {widest}. Ask for less, or "
        "export a bundle with wider widths"
    )
