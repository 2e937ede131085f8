"""Compile a Triton kernel once, whatever width it is launched at."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton

KERNELS: dict[str, Any] = {}
"""Every kernel of the modules that were imported, by its name."""


def compile_once(function: Callable[..., Any]) -> Any:
    """Jit a kernel whose integer arguments never cause another compilation.

    Triton compiles a variant of a kernel for every integer that is 1 or a multiple of 16. A channel
    count changes between those classes from width to width, so integers (parameters annotated
    ``int``) are passed as they are. Parameters and running statistics (names that end in
    ``slice_ptr``) may begin anywhere in a larger tensor, so nor does their alignment count.
    """
    parameters = signature(function).parameters.values()
    KERNELS[function.__name__] = triton.jit(
        do_not_specialize=[p.name for p in parameters if p.annotation is int],
        do_not_specialize_on_alignment=[p.name for p in parameters if p.name.endswith("slice_ptr")],
    )(function)
    return KERNELS[function.__name__]
