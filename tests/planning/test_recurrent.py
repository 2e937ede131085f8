"""Recurrent layers and cells: all gates, layers and directions narrow together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from agreement import assert_agrees, assert_gradients, configurations, convert
from torch import Tensor, nn

import anywidth as aw

x = torch.randn(3, 5, 8)


class Sequence(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int = 1, both: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(64 if both else 32, 3)
        self.cells = kind(16, 32, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.stem(x))[0])


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_narrow_and_are_counted(kind: type[nn.RNNBase], gates: int) -> None:
    model = Sequence(kind, both=True)
    before = model(x)
    convert(model, x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (2, 3)
    assert torch.equal(model(x), before)
    whole = 5 * (8 * 16 + 64 * 3 + 2 * gates * 32 * (16 + 32))
    half = 5 * (8 * 8 + 32 * 3 + 2 * gates * 16 * (8 + 16))
    assert (aw.macs(model, 1.0), aw.macs(model, 0.5)) == (whole, half)
    assert_agrees(model, x)
    small = aw.extract(model, 0.5)
    assert (small.cells.hidden_size, small.cells.input_size) == (16, 8)
    assert small.cells.weight_ih_l0.shape == (gates * 16, 8)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_stacked_layers_train_and_are_copied_at_a_width(kind: type[nn.RNNBase]) -> None:
    model = convert(Sequence(kind, layers=2, both=True), x)
    for config in configurations(model):
        assert_gradients(model, config, x)
    with aw.at_width(model, 0.5):
        narrow = model.eval()(x)
        torch.testing.assert_close(copy.deepcopy(model)(x), narrow)
    small = aw.extract(model, 0.5).eval()
    torch.testing.assert_close(small(x), narrow)
    # The list that a plain layer reads holds its own parameters.
    assert small.cells._flat_weights[0] is small.cells.weight_ih_l0
    with torch.no_grad():
        small.cells.weight_ih_l0.zero_()
    assert not torch.equal(small(x), narrow)
    model.double()
    with aw.at_width(model, 0.5):
        torch.testing.assert_close(model(x.double()).float(), narrow)


class Translator(nn.Module):
    """The last state of one layer is the first of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 16), nn.Linear(32, 12)
        self.reader, self.writer = nn.LSTM(16, 32), nn.LSTM(16, 32)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        state = self.reader(self.words(given))[1]
        return self.head(self.writer(self.words(wanted), state)[0] + state[0][-1])


def test_a_state_is_handed_on() -> None:
    words = torch.arange(15).view(5, 3) % 12
    model = convert(Translator(), (words, words))
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert_agrees(model, words, words)


class OwnState(nn.Module):
    """Makes the first state by a number that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = 32
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(32, 3)
        self.cells = nn.GRU(16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), self.hidden_size)
        return self.head(self.cells(self.stem(x), state)[0][:, -1])


def test_a_first_state_made_by_hand_narrows() -> None:
    model = convert(OwnState(), x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert_agrees(model, x)
    assert aw.extract(model, 0.5).hidden_size == 16


class Steps(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(8, 16), kind(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in self.stem(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_narrow(kind: type[nn.RNNCellBase]) -> None:
    model = Steps(kind)
    before = model(x)
    convert(model, x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert torch.equal(model(x), before)
    assert_agrees(model, x)


def test_a_state_given_from_outside_keeps_its_size() -> None:
    class Given(Steps):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
            return self.head(self.cell(self.stem(x[:, 0]), state))

    inputs = x, torch.randn(3, 32)
    model = convert(Given(nn.GRUCell), inputs, allow_fixed=True)
    assert "constant" in (aw.plan_of(model).group_of("cell").fixed or "")
    assert_agrees(model, *inputs)
