"""Make Triton's interpreter work with NumPy 2.4 and bfloat16, and compare what it computes."""

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter
from torch import Tensor

_patch_tensor = triton.runtime.interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor, scope):
    # The interpreter keeps a scalar as an array of one element, which int() no longer takes.
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


triton.runtime.interpreter._patch_lang_tensor = _patch_tensor_with_index

_dot = triton.runtime.interpreter.InterpreterBuilder.create_dot


def _dot_of_bfloat16(self, a, b, *rest):
    # The interpreter keeps bfloat16 as the bits of whole numbers, and would multiply these.
    return _dot(self, _in_float32(a), _in_float32(b), *rest)


def _in_float32(handle):
    if handle.dtype != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return triton.runtime.interpreter.TensorHandle(data, tl.float32)


triton.runtime.interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
# Memory that no kernel wrote to then holds NaN.
torch.use_deterministic_algorithms(True)


def assert_near(actual: Tensor | None, expected: Tensor, tolerance: float) -> None:
    """Fail where the largest error is more than ``tolerance`` of the largest expected value."""
    assert actual is not None
    assert actual.shape == expected.shape
    error = float((actual.detach().double() - expected.detach().double()).abs().max())
    largest = float(expected.detach().double().abs().max())
    assert error <= tolerance * max(largest, 1e-3), f"{error=} {largest=}"  # False for NaN
