"""Networks and input shapes named on a command line."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from anywidth import models
from anywidth.errors import AnywidthError, did_you_mean

FORMS = (
    "mobilenet_v1, torchvision:resnet50, timm:resnet50, package.module:function or "
    "path/to/file.py:function"
)

# Their own initialisation takes many seconds; PyTorch's default is used instead.
_SLOW_TO_INITIALIZE = ("googlenet", "inception_v3")


def load_model(spec: str, **options: Any) -> nn.Module:
    """Build the network that `spec` names; nothing is downloaded.

    Args:
        spec: a network of `anywidth.models` ("mobilenet_v1"), one of torchvision
            ("torchvision:resnet50"), one of timm ("timm:resnet50"), or any function that returns
            a network ("package.module:function", where the current folder is searched too, or
            "path/to/file.py:function").
        options: arguments of the function that builds it, e.g. `num_classes=10`.

    Example:
        >>> load_model("torchvision:mobilenet_v2", num_classes=10)
    """
    source, colon, name = spec.partition(":")
    if not colon:
        return _build(spec, _from_zoo(spec), options)
    if source not in ("torchvision", "timm"):
        source, _, name = spec.rpartition(":")  # a path may have a colon
    if not source or not name:
        raise AnywidthError(f"no network {spec!r}: expected something like {FORMS}")
    if source == "torchvision":
        return _build(spec, _from_torchvision(name), options)
    if source == "timm":
        return _build(spec, _from_timm(name), options)
    file = Path(source).expanduser() if source.endswith(".py") else None
    with _importable(Path.cwd() if file is None else file.absolute().parent):
        found = _from_module(spec, source, file, name)
        return found if isinstance(found, nn.Module) else _build(spec, found, options)


MOST_ENTRIES = 2**29
"""The largest example, which is 2 GB in single precision."""


def is_code(spec: str) -> bool:
    """Whether building `spec` runs code beside the zoo's, torchvision's and timm's."""
    return spec.partition(":")[0] not in ("torchvision", "timm") if ":" in spec else False


def parse_input(text: str) -> tuple[int, ...]:
    """The shape of one example, without the batch: "3x224x224" gives (3, 224, 224)."""
    parts = [part.strip() for part in text.lower().split("x")]
    # Only ASCII digits: int() would also take "1_0" and other scripts.
    are_digits = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    if not are_digits or not 0 < math.prod(map(int, parts)) <= MOST_ENTRIES:
        raise AnywidthError(
            f"input {text!r} is not a shape: expected whole numbers above 0 joined by x, without "
            f"the batch, such as 3x224x224, with at most {MOST_ENTRIES:,} entries"
        )
    return tuple(map(int, parts))


def _from_zoo(name: str) -> Callable[..., Any]:
    if name not in models.__all__:
        raise AnywidthError(
            f"no network {name!r} in anywidth.models{did_you_mean(name, models.__all__)}: "
            f"expected one of {', '.join(models.__all__)}, or a name with its source: "
            f"torchvision:{name}, timm:{name} or package.module:{name}"
        )
    builder: Callable[..., Any] = getattr(models, name)
    return builder


def _from_torchvision(name: str) -> Callable[..., Any]:
    try:
        from torchvision.models import get_model_builder, list_models
    except ImportError as error:
        raise AnywidthError(
            f"torchvision:{name} needs torchvision ({error}): install anywidth[cli]"
        ) from error
    if name not in list_models():
        raise AnywidthError(
            f"no network {name!r} in torchvision{did_you_mean(name, list_models())}: "
            "torchvision.models.list_models() lists all"
        )
    builder = get_model_builder(name)
    fixed: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        fixed["weights_backbone"] = None
    if name in _SLOW_TO_INITIALIZE:
        fixed["init_weights"] = False
    return lambda **options: builder(**{**fixed, **options})


def _from_timm(name: str) -> Callable[..., Any]:
    try:
        import timm
    except ImportError as error:
        raise AnywidthError(f"timm:{name} needs timm ({error}): install anywidth[timm]") from error
    if not timm.is_model(name):
        raise AnywidthError(
            f"no network {name!r} in timm{did_you_mean(name, timm.list_models())}: "
            "timm.list_models() lists all"
        )
    return lambda **options: timm.create_model(name, **{"pretrained": False, **options})


def _from_module(spec: str, module_name: str, file: Path | None, name: str) -> Any:
    try:
        found: Any = (
            importlib.import_module(module_name) if file is None else _module_of_file(spec, file)
        )
    except AnywidthError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise AnywidthError(
                f"{spec!r}: importing {module_name} failed, {error}; install that package"
            ) from error
        raise AnywidthError(
            f"{spec!r}: no module {error.name!r} in the current folder or among the installed "
            f"packages; expected something like {FORMS}"
        ) from error
    except Exception as error:
        raise AnywidthError(f"{spec!r}: importing {module_name} raised {_spell(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in dir(found) if not known.startswith("_")]
            meant = did_you_mean(part, names)
            raise AnywidthError(f"{spec!r}: {module_name} has no {part!r}{meant}")
        found = getattr(found, part)
    if not callable(found):
        raise AnywidthError(
            f"{spec!r} is {type(found).__name__}: expected a function that returns a network"
        )
    return found


def _module_of_file(spec: str, file: Path) -> ModuleType:
    """A Python file as a module; the same file gives the same module."""
    if not file.is_file():
        raise AnywidthError(f"{spec!r}: there is no file {file}")
    path = str(file.resolve())
    name = f"anywidth_model_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        described = importlib.util.spec_from_file_location(name, path)
        assert described is not None
        assert described.loader is not None
        module = importlib.util.module_from_spec(described)
        sys.modules[name] = module  # its classes can be pickled and its dataclasses found
        try:
            described.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _build(spec: str, builder: Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    try:
        model = builder(**options)
    except AnywidthError:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        with_options = f" with {given}" if given else ""
        raise AnywidthError(f"building {spec!r}{with_options} raised {_spell(error)}") from error
    if not isinstance(model, nn.Module):
        raise AnywidthError(
            f"{spec!r} returned {type(model).__name__}: expected a function that returns a "
            "torch.nn.Module"
        )
    return model


@contextlib.contextmanager
def _importable(path: Path) -> Iterator[None]:
    """Modules in a folder can be imported: as with `python -m`, or beside a file that is run."""
    folder = str(path)
    if folder in sys.path or (not sys.path[0] and path == Path.cwd()):
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _spell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
