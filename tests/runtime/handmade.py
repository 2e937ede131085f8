"""A bundle made by hand, without PyTorch, so that a test can make every part of it wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from anywidth_runtime.bundle_file import encode_bundle
from onnx import ModelProto, TensorProto, helper

INPUTS, HIDDEN, OUTPUTS = 4, 8, 3
WIDTHS = {0.25: 2, 0.5: 4, 1.0: 8}


def graph_of(hidden: int) -> ModelProto:
    """Two layers of `hidden` units; the runtime has to hand over both weights."""
    weights = [outside("first", [INPUTS, hidden]), outside("second", [hidden, OUTPUTS])]
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "second"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])
    found = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", OUTPUTS])
    graph = helper.make_graph(nodes, "net", [given], [found], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def outside(name: str, shape: list[int], location: str = "weights") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    return tensor


class Handmade:
    """The parts of a bundle of three widths: change them, then `write` them."""

    def __init__(self) -> None:
        chance = np.random.default_rng(0)
        self.first = chance.standard_normal((HIDDEN, INPUTS)).astype(np.float32)
        self.second = chance.standard_normal((HIDDEN, OUTPUTS)).astype(np.float32)
        self.graphs = [graph_of(hidden) for hidden in WIDTHS.values()]
        self.pieces: list[dict[str, Any]] = [
            {
                "first": {
                    "weight": "a",
                    "cuts": [[[0, hidden // 2], [4, hidden // 2]], None],
                    "order": [1, 0],
                    "scale": [0, 1],
                },
                "second": {
                    "weight": "b",
                    "cuts": [[[0, hidden]], None],
                    "order": [0, 1],
                    "scale": None,
                },
            }
            for hidden in WIDTHS.values()
        ]
        self.scales = [np.arange(1 + hidden, dtype=np.float32) for hidden in WIDTHS.values()]
        self.about: dict[str, Any] = {
            "task": None,
            "takes": "numbers",
            "classes": ["a", "b", "c"],
            "facts": {},
            "accuracy_name": None,
            "machine": {},
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4], "example": [1, 4]}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3], "example": []}],
            "widths": [
                {
                    "width": width,
                    "variant": variant,
                    "macs": 7 * hidden,
                    "parameters": 7 * hidden,
                    "metrics": {},
                    "accuracy": None,
                    "latency_ms": None,
                }
                for variant, (width, hidden) in enumerate(WIDTHS.items())
            ],
        }

    def tensors(self) -> dict[str, np.ndarray]:
        found = {"weight/a": self.first, "weight/b": self.second}
        for number, (graph, pieces, scales) in enumerate(
            zip(self.graphs, self.pieces, self.scales, strict=True)
        ):
            found[f"graph/{number}"] = np.frombuffer(graph.SerializeToString(), np.uint8)
            found[f"pieces/{number}"] = np.frombuffer(json.dumps(pieces).encode(), np.uint8)
            found[f"scales/{number}"] = scales
        return found

    def write(self, folder: Path) -> Path:
        path = folder / "net.anywidth"
        path.write_bytes(encode_bundle(self.tensors(), self.about))
        return path

    def expected(self, x: np.ndarray, width: float) -> np.ndarray:
        hidden = WIDTHS[width]
        rows = [*range(hidden // 2), *range(4, 4 + hidden // 2)]
        first = self.first[rows] * np.arange(1, 1 + hidden, dtype=np.float32)[:, None]
        return np.maximum(x @ first.T, 0) @ self.second[:hidden]
