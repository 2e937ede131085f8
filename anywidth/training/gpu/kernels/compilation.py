"""Compile a Triton kernel once for all widths."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton

KERNELS: dict[str, Any] = {}
"""All kernels of the imported modules, by name."""


def compile_once(function: Callable[..., Any]) -> Any:
    """Jit a kernel whose integer arguments never cause another compilation.

    Triton compiles separate variants for integers that are 1 or multiples of 16. Channel counts
    change between these classes from width to width, so integers (parameters annotated ``int``) are
    not specialised. Nor is the alignment of parameters and running statistics (names that end in
    ``slice_ptr``), which may start anywhere in a larger tensor.
    """
    parameters = signature(function).parameters.values()
    KERNELS[function.__name__] = triton.jit(
        do_not_specialize=[p.name for p in parameters if p.annotation is int],
        do_not_specialize_on_alignment=[p.name for p in parameters if p.name.endswith("slice_ptr")],
    )(function)
    return KERNELS[function.__name__]
