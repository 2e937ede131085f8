"""Recurrent layers keep a list of their weights; a narrowed one gives the active parts."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn


def _flat_weights(self: Any) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _keep_whole(self: Any, _: Any) -> None:
    """The list that a plain layer will have again holds the parameters themselves."""
    self.__dict__["_flat_weights"] = [self._parameters.get(n) for n in self._flat_weights_names]


def _weights_have_changed(self: Any) -> bool:
    return False  # the list is made at each call


def _flatten_parameters(self: Any) -> None:
    """cuDNN wants all weights side by side in memory, which parts of them are not."""
    if all(a is b for a, b in zip(self._flat_weights, self.__dict__["_flat_weights"], strict=True)):
        nn.RNNBase.flatten_parameters(self)


def _set_state(self: Any, state: dict[str, Any]) -> None:
    """A copy is made of parts, which must not be cut again."""
    nn.Module.__setstate__(self, state)
    _keep_whole(self, None)
    kept = self.__dict__["_flat_weights"]
    self.__dict__["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in kept]


RECURRENT: dict[str, Any] = {
    "_flat_weights": property(_flat_weights, _keep_whole),
    "_weights_have_changed": _weights_have_changed,
    "flatten_parameters": _flatten_parameters,
    "__setstate__": _set_state,
}
