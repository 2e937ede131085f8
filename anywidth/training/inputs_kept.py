"""A batch is read by several widths, so no pass may change it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.training.engine.trees import leaves


@contextlib.contextmanager
def inputs_kept(inputs: Any) -> Iterator[None]:
    """Refuse a network that changes its input in place: the next width would get what it left.

    PyTorch counts the changes of a tensor, so this costs nothing and waits for no device.
    """
    tensors = [x for x in leaves(inputs) if isinstance(x, Tensor) and not x.is_inference()]
    before = [tensor._version for tensor in tensors]
    yield
    if [tensor._version for tensor in tensors] != before:
        raise AnywidthError(
            "the network changes its input in place, and several widths run on the same batch: "
            "each would get what the one before has left. Write x = x - mean instead of x -= mean "
            "or x.sub_(mean) in its forward, and inplace=False in a first layer"
        )
