"""The error class of this library, and how messages list names."""

from collections.abc import Sequence


class AnywidthError(ValueError):
    """Raised for every value that this library cannot use.

    The message names the value given, what was expected, and the fix.
    """


_MOST_NAMES = 5


def few_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + rest
