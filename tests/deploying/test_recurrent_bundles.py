"""Recurrent layers have their gates in another order in ONNX; their weights are still held once."""

from __future__ import annotations

import math
from pathlib import Path

import anywidth_runtime
import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import anywidth as aw
from anywidth.deploying.branching import write_branches
from anywidth.translating.called_network import described
from anywidth.translating.onnx_graphs import open_onnx

WIDTHS = [0.25, 0.5, 1.0]
HIDDEN = 64


class Layers(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: bool | int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = kind(32, HIDDEN, batch_first=True, **options)
        self.last = nn.Linear(HIDDEN * (1 + bool(options.get("bidirectional"))), 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.words(x))[0][:, -1])


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(50, 32), kind(32, HIDDEN)
        self.last = nn.Linear(HIDDEN, 7)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for word in self.words(x).unbind(1):
            state = self.cell(word, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


NETWORKS = {
    "lstm": lambda: Layers(nn.LSTM),
    "two_layers_both_ways": lambda: Layers(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: Layers(nn.GRU),
    "lstm_cell": lambda: Cells(nn.LSTMCell),
    "gru_cell": lambda: Cells(nn.GRUCell),
}


def converted(name: str) -> nn.Module:
    torch.manual_seed(0)
    model, words = NETWORKS[name](), torch.randint(50, (2, 4))
    return aw.slimmable(model, aw.plan(model, words), aw.WidthRange(0.25, 1.0, divisor=4)).eval()


def largest_kept(graph: onnx.GraphProto) -> int:
    """The number of values of the largest weight that a graph has of its own."""
    own = [one for one in graph.initializer if one.data_location != onnx.TensorProto.EXTERNAL]
    return max(math.prod(one.dims) for one in own)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_bundle_holds_recurrent_weights_once(name: str, tmp_path: Path) -> None:
    model, path = converted(name), tmp_path / "net.anywidth"
    aw.export_bundle(model, path, WIDTHS, measure_latency=False, progress=False)
    net = anywidth_runtime.open(path)
    for variant in net._bundle.variants:
        assert largest_kept(onnx.load_from_string(variant.graph).graph) < 256
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    assert path.stat().st_size < weights + 60_000
    words = torch.randint(50, (3, 4))
    for width in WIDTHS:
        with torch.no_grad(), aw.at_width(model, width):
            true = model(words)
        found = net.run(words.numpy(), width=width)
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-5)


def test_a_file_with_branches_holds_recurrent_weights_once(tmp_path: Path) -> None:
    model, path = converted("two_layers_both_ways"), tmp_path / "net.onnx"
    assert write_branches(model, described(model), path, WIDTHS) < 1e-5
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    assert path.stat().st_size < weights + 120_000
    run = open_onnx(path.read_bytes())
    words = torch.randint(50, (3, 4))
    for width in WIDTHS:
        with torch.no_grad(), aw.at_width(model, width):
            true = model(words)
        np.testing.assert_allclose(run(words, torch.tensor(width))[0], true, rtol=1e-5, atol=1e-5)
