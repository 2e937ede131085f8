"""The activations a batch norm can be fused with, and their derivatives, inside a kernel.

Comparisons are written so that a NaN stays a NaN, as it does in PyTorch.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of ``z``."""
    if ACTIVATION == "relu":
        z = tl.where(z <= 0, 0.0, z)
    elif ACTIVATION == "relu6":
        z = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "hardswish":
        z = tl.where(z <= -3, 0.0, tl.where(z >= 3, z, z * (z + 3) * (1 / 6)))
    return z


@triton.jit
def through_activation(dy, z, ACTIVATION: tl.constexpr):
    """The gradient at ``z``, given the gradient ``dy`` of its activation."""
    if ACTIVATION == "relu":
        dy = tl.where(z <= 0, 0.0, dy)
    elif ACTIVATION == "relu6":
        dy = tl.where((z <= 0) | (z >= 6), 0.0, dy)
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(z)
        dy = dy * gate * (1 + z * (1 - gate))
    elif ACTIVATION == "hardswish":
        dy = tl.where(z <= -3, 0.0, tl.where(z >= 3, dy, dy * (z * (1 / 3) + 0.5)))
    return dy
