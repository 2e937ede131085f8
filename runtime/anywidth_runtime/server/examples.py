"""Example inputs inside a bundle."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anywidth_runtime.errors import BundleError
from anywidth_runtime.network import Network
from anywidth_runtime.server.protocol import FROM_NUMPY

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Example:
    """One example input.

    Args:
        name: its content, such as its true class.
        picture: a PNG file that shows it; for networks that take pictures, also the input itself.
        tensor: the input of other networks, in the form of the Open Inference Protocol.
    """

    name: str
    picture: bytes
    tensor: dict[str, Any] | None = None


def read_examples(network: Network) -> list[Example]:
    """The examples in a bundle's facts; none if it has none."""
    text = network.facts.get("examples")
    if text is None:
        return []
    try:
        return [_read(one, network) for one in json.loads(text)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{network.path}: its examples cannot be read ({error})") from error


def _read(data: Any, network: Network) -> Example:
    picture = base64.b64decode(data["picture"], validate=True)
    if not picture.startswith(_PNG):
        raise ValueError("a picture that is no PNG")
    if data.get("tensor") is None:
        return Example(str(data["name"]), picture)
    first = network.inputs[0]
    raw = base64.b64decode(data["tensor"]["data"], validate=True)
    shape = [int(size) for size in data["tensor"]["shape"]]
    if len(raw) != math.prod(shape) * np.dtype(first.dtype).itemsize:
        raise ValueError(f"a tensor of shape {shape} in {len(raw)} bytes")
    tensor = {
        "name": first.name,
        "datatype": FROM_NUMPY[first.dtype],
        "shape": shape,
        "data": np.frombuffer(raw, first.dtype).tolist(),
    }
    return Example(str(data["name"]), picture, tensor)
