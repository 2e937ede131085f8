"""Spectral norm: a weight divided by its largest singular value, in either of torch's forms.

torch keeps two vectors that training turns towards the singular ones, a step at each pass. Cut to
their first entries they belong to no weight, so a narrower weight gets vectors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

# As many as torch takes for a new layer.
STEPS = 15


def spectral_vectors(model: nn.Module) -> Iterator[str]:
    """The names of the buffers that hold the two vectors of each spectral norm."""
    for path, module in model.named_modules():
        names = [f"{hook.name}_{end}" for hook in spectral_hooks(module) for end in "uv"]
        names += ["_u", "_v"] if isinstance(module, _SpectralNorm) else []
        yield from (f"{path}.{name}".lstrip(".") for name in names)


def spectral_hooks(module: nn.Module) -> list[SpectralNorm]:
    """The spectral norms that hooks compute: those of `torch.nn.utils.spectral_norm`."""
    return [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]


@torch.no_grad()
def singular_vectors(matrix: Tensor, near: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The left and right vector of a matrix's largest singular value.

    They are the best in what some power iterations pass through, which is far closer than where
    these end. The first vector is the same each time, so that the same weights give the same
    result: `near`, with a little of a wave in case that is nothing but zeros.
    """
    with torch.autocast(matrix.device.type, enabled=False):
        matrix, size = matrix.to(torch.promote_types(matrix.dtype, torch.float32)), len(near)
        wave = torch.arange(size, device=matrix.device, dtype=matrix.dtype).cos()
        step = matrix.mT @ (matrix @ (near + wave * (0.1 / size**0.5)))
        passed = F.normalize(step, dim=0, eps=eps).unsqueeze(1)
        for _ in range(min(STEPS, *matrix.shape) - 1):
            step = matrix.mT @ (matrix @ passed[:, -1])
            for _ in range(2):  # once more for what rounding left
                step = step - passed @ (passed.mT @ step)
            passed = torch.cat([passed, F.normalize(step, dim=0, eps=eps).unsqueeze(1)], 1)
        images = matrix @ passed
        mixes = torch.linalg.eigh(images.mT @ images).eigenvectors
        right = F.normalize(passed @ mixes[:, -1], dim=0, eps=eps)
        left = F.normalize(matrix @ right, dim=0, eps=eps)
    return left.to(near.dtype), right.to(near.dtype)
