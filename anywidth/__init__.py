"""One trained network, run at any width."""

from anywidth._version import __version__
from anywidth.errors import AnywidthError

__all__ = ["AnywidthError", "__version__"]
