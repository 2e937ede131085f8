"""The one error a user of this library has to know, and how its messages list names."""

from collections.abc import Sequence


class AnywidthError(ValueError):
    """Something that was handed in cannot be used.

    The message names the value given, what was expected, and the call that fixes it.
    """


_MOST_NAMES = 5


def few_of(names: Sequence[str]) -> str:
    """The first few names, and how many there are beside them."""
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest
