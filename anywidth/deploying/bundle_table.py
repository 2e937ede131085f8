"""The description in a bundle: its inputs and outputs, and the measurements of its widths."""

from __future__ import annotations

from typing import Any

from anywidth.measuring.spectra import Spectrum
from anywidth.translating.deployment import Deployment
from anywidth.width import ChannelConfig

# An error in percent is shown as an accuracy.
_ERROR = "error"


def described_tensors(deployment: Deployment, graph: Any) -> dict[str, list[dict[str, Any]]]:
    """Name, type and shape of each input and output; latency is measured with one example."""
    from onnx.helper import tensor_dtype_to_np_dtype

    free: dict[str, str] = {}
    inputs = []
    for one, example, names in zip(
        graph.input, deployment.examples, deployment.free_axes, strict=True
    ):
        for axis, name in names.items():
            free[one.type.tensor_type.shape.dim[axis].dim_param] = name
        sizes = [1 if axis == 0 and 0 in names else n for axis, n in enumerate(example.shape)]
        shape = [names.get(axis, size) for axis, size in enumerate(example.shape)]
        dtype = str(example.dtype).removeprefix("torch.")
        inputs.append({"name": one.name, "dtype": dtype, "shape": shape, "example": sizes})
    outputs = []
    for one in graph.output:
        kind = one.type.tensor_type
        # The name of a size that depends on the inputs is a formula of their sizes.
        shape = [free.get(n.dim_param, n.dim_param) or n.dim_value for n in kind.shape.dim]
        dtype = tensor_dtype_to_np_dtype(kind.elem_type).name
        outputs.append({"name": one.name, "dtype": dtype, "shape": shape, "example": []})
    return {"inputs": inputs, "outputs": outputs}


def measured_at(spectrum: Spectrum | None, config: ChannelConfig) -> dict[str, Any]:
    """The metrics of a configuration; `accuracy` is the main one, and larger is better."""
    if spectrum is None:
        return {"metrics": {}, "accuracy": None}
    metrics = next((p.metrics for p in spectrum.points if p.channels == config), {})
    main = spectrum.metric()
    value = metrics.get(main)
    if value is not None and spectrum.describe(main).lower_is_better:
        value = 100 - value if _ERROR in main else -value
    return {"metrics": dict(metrics), "accuracy": value}


def accuracy_name(spectrum: Spectrum | None) -> str | None:
    """The name of the metric in the column `accuracy`."""
    if spectrum is None:
        return None
    main = spectrum.metric()
    if not spectrum.describe(main).lower_is_better:
        return main
    return main.replace(_ERROR, "accuracy") if _ERROR in main else f"-{main}"
