"""Scales and biases of norms that were tuned per width after training, beside the statistics.

Those of a slimmable network's switches are parameters instead (`switchable.py`); a norm reads both
in the same way (`layers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.layers import dress
from anywidth.slimming.norm_statistics import Affine, NormRecord

_NAMES = ("weight", "bias")


def allow_tuned(norm: nn.Module, record: NormRecord) -> None:
    """Have a norm look for a scale and bias of its current width."""
    if not record.has_tuned:
        record.has_tuned = True
        dress(norm)


def is_affine(name: str) -> bool:
    """Whether a tensor of a file of statistics is a tuned scale or bias."""
    return name.rpartition(".")[2] in _NAMES


def read_affine(
    norm: nn.Module, prefix: str, tensors: Mapping[str, Tensor], size: int
) -> Affine | None:
    """The tuned scale and bias of a norm from a file of statistics; None if it has none."""
    held = {name: norm._parameters.get(name) for name in _NAMES}
    given = {name: tensors.get(prefix + name) for name in _NAMES}
    if all(tensor is None for tensor in given.values()):
        return None
    like = held["weight"]
    found: dict[str, Tensor | None] = {}
    for name, tensor in given.items():
        if (tensor is None) != (held[name] is None):
            raise AnywidthError(
                f"{prefix}{name}: a tuned scale needs its bias, and a norm that has both"
            )
        if tensor is not None and (
            tuple(tensor.shape) != (size,) or not tensor.is_floating_point()
        ):
            raise AnywidthError(
                f"{prefix}{name} has shape {tuple(tensor.shape)}: expected {size} numbers"
            )
        found[name] = None if tensor is None or like is None else tensor.detach().to(like).clone()
    scale = found["weight"]
    return None if scale is None else Affine(scale, found["bias"])
