"""The one error a user of this library has to know."""


class AnywidthError(ValueError):
    """Something that was handed in cannot be used.

    The message names the value given, what was expected, and the call that fixes it.
    """
