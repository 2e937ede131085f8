"""One trained network, run at any width."""

from anywidth._version import __version__ as __version__

# Neither `typing` nor `__future__`: `python -m` looks for them in the working folder first.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anywidth.interface import *  # noqa: F403
    from anywidth.interface import __all__ as __all__
else:

    def __getattr__(name: str) -> "Any":
        """Load the library when one of its names is used, because PyTorch takes seconds to import.

        `anywidth --help` and shell completion never use one.
        """
        if name == "__all__" or not name.startswith("_"):
            from importlib import import_module

            interface = vars(import_module("anywidth.interface"))
            for place in (interface, globals()):  # folders of the package are attributes too
                if name in place:
                    return globals().setdefault(name, place[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
