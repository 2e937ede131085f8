"""Spectral norm at other widths: the active weight is divided by its own largest singular value.

At full width torch's own code runs, and writes its vectors. At other widths nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm

from anywidth.planning.spectral_norms import singular_vectors, spectral_hooks
from anywidth.slimming.record import record_of

Part = Callable[[Any], Tensor | None]


def hooked_vectors(tensors: tuple[str, ...], part: Callable[[str], Part]) -> dict[str, property]:
    """Properties for the two vectors of each weight that a hook divides; `part` gives the cut."""
    stems = [name.removesuffix("_orig") for name in tensors if name.endswith("_orig")]
    return {
        f"{stem}_{end}": property(_hooked_vector(stem, end, part)) for stem in stems for end in "uv"
    }


def _hooked_vector(stem: str, end: str, part: Callable[[str], Part]) -> Part:
    own, right = part(f"{stem}_{end}"), part(f"{stem}_v")

    def vector(self: Any) -> Tensor | None:
        hook = next((h for h in spectral_hooks(self) if h.name == stem), None)
        if hook is None:
            raise AttributeError(f"{type(self).__name__} has no {stem}_{end}")
        weight, near = getattr(self, f"{stem}_orig"), right(self)
        if near is None or weight.shape == self._parameters[f"{stem}_orig"].shape:
            return own(self)
        vectors = singular_vectors(hook.reshape_weight_to_matrix(weight), near, hook.eps)
        return vectors["uv".index(end)]

    return vector


def narrow_forward(self: Any, weight: Tensor) -> Tensor:
    """`_SpectralNorm.forward` for the active part of a weight."""
    record: Any = record_of(self)
    if not _is_narrow(self):
        whole: Tensor = record.plain.forward(self, weight)
        return whole
    matrix = self._reshape_weight_to_matrix(weight)
    left, right = singular_vectors(matrix, self._v, self.eps)
    return weight / torch.vdot(left, torch.mv(matrix, right))


def _is_narrow(norm: Any) -> bool:
    return any(getattr(norm, n).shape != norm._buffers[n].shape for n in ("_u", "_v"))


def narrow_vectors(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each parametrized weight that is narrow: a buffer of a vector, and the vector it needs."""
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    for steps in lists:
        if not any(isinstance(step, _SpectralNorm) for step in steps):
            continue
        names = ["original"] if steps.is_tensor else [f"original{i}" for i in range(steps.ntensors)]
        values: tuple[Any, ...] = tuple(getattr(steps, name) for name in names)
        for step in steps:
            if isinstance(step, _SpectralNorm) and _is_narrow(step):
                matrix = step._reshape_weight_to_matrix(values[0])
                vectors = singular_vectors(matrix, step._v, step.eps)
                yield from zip((step._buffers["_u"], step._buffers["_v"]), vectors, strict=True)
            values = (step(*values),)
