"""Tools of PyTorch that fix one width, overlook converted layers or stop at some number of widths.

None of them does so silently.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from anywidth.errors import AnywidthError

_CURE = "extract one width first, anywidth.extract(model, width), which is a plain network"


def refuse_scripting(module: Any) -> Any:
    """`__prepare_scriptable__` of converted layers: `torch.jit.script` calls it."""
    raise AnywidthError(f"torch.jit.script cannot compile a network whose width changes: {_CURE}")


def check_not_traced() -> None:
    if torch.jit.is_tracing():
        raise AnywidthError(
            "torch.jit.trace (which older ONNX exports and TensorBoard's add_graph use) would keep "
            f"one width of this network for good: {_CURE}; or use anywidth.export_bundle"
        )


def check_attribute(name: str) -> None:
    """`torch.ao.quantization` begins by giving every layer a `qconfig`.

    It looks for layers by their exact class, so it would leave converted ones as they are.
    """
    if name == "qconfig":
        raise AnywidthError(
            f"torch.ao.quantization knows plain layers alone, not converted ones: {_CURE}, and "
            "quantize that"
        )


def warn_if_not_compiled() -> None:
    """`torch.compile` makes one graph per width, and runs the widths beyond its limit without."""
    if get_eval_frame_callback() is False:  # Python may run, but nothing new is compiled
        warnings.warn(
            "torch.compile runs this network uncompiled at this width: it compiles a graph per "
            "width, and has reached its limit. Before the first call, set "
            "torch._dynamo.config.recompile_limit to more than the number of widths",
            stacklevel=4,
        )
