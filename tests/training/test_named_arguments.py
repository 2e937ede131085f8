"""Networks whose arguments are given by name, from the plan to the extracted network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_close
from torch import Tensor, nn

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Language(nn.Module):
    """As Hugging Face's: arguments by name, a loss if there are labels, a dataclass for output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        logits = self.head(self.body(x.mean(1)))
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


torch.export.register_dataclass(Output)


def batch(count: int = 8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (count, 6), generator=generator)
    mask = (torch.rand(count, 6, generator=generator) > 0.3).float()
    return {"input_ids": ids, "attention_mask": mask}


def labels(count: int = 8) -> Tensor:
    return torch.arange(count) % 5


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    network = Language()
    plan = aw.plan(network, **batch())
    assert len(plan.elastic()) == 2
    return aw.slimmable(network, plan, aw.WidthRange(0.25, 1.0, 4))


def train(model: nn.Module) -> None:
    step = aw.SandwichStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda output, y: F.cross_entropy(output.logits, y),
        lambda output, full: aw.soft_cross_entropy(output.logits, full.logits),
    )
    for seed in range(2):
        result = step(batch(seed=seed), labels())
    assert isinstance(result.outputs[0], Output)


def test_from_plan_to_extracted_network(model: Any) -> None:
    train(model)
    aw.calibrate(model, [batch(), (batch(3), labels(3))], WIDTHS, samples=9)
    model.eval()
    for width in WIDTHS:
        small = aw.extract(model, width)
        with aw.at_width(model, width), torch.no_grad():
            assert_close(small(**batch()).logits, model(**batch()).logits)
    assert aw.latency(model, 0.5, repeats=1, warmup=0).median > 0


@pytest.mark.parametrize("by", ["names", "dict", "position"])
def test_all_ways_give_one_plan(by: str) -> None:
    torch.manual_seed(0)
    network, given = Language(), batch()
    found = {
        "names": lambda: aw.plan(
            network, given["input_ids"], attention_mask=given["attention_mask"]
        ),
        "dict": lambda: aw.plan(network, given),
        "position": lambda: aw.plan(network, (given["input_ids"], None, given["attention_mask"])),
    }[by]()
    assert found.to_json() == aw.plan(network, **given).to_json()
    read = aw.Plan.from_json(found.to_json())
    aw.slimmable(network, read, aw.WidthRange(0.25, 1.0, 4))  # verified with what the plan kept


def test_a_dict_is_one_argument_of_a_network_that_takes_one() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

        def forward(self, features: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
            output = self.body(features["x"])
            return output.square().mean(), {"size": 3.0}

    given = {"x": torch.randn(8, 6)}
    model = aw.slimmable(Plain(), None, aw.WidthRange(0.25, 1.0, 4), example_input=given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aw.SandwichStep(model, optimizer, lambda output, _: output[0], distill=None)
    result = step(given)
    assert result.losses[0] == result.outputs[0][0]
    assert result.outputs[0][1] == {"size": 3.0}
    aw.calibrate(model, [given], WIDTHS, forward=lambda model, batch: model(batch))


def test_names_that_forward_does_not_take(model: Any) -> None:
    wrong = {**batch(), "label": labels()}
    with pytest.raises(aw.AnywidthError, match="label"):
        aw.plan(Language(), **wrong)
    with pytest.raises(aw.AnywidthError, match="label"):
        aw.SandwichStep(model, None, F.cross_entropy, None).backward(wrong, labels())
    with pytest.raises(aw.AnywidthError, match="label"):
        aw.calibrate(model, [wrong], WIDTHS)
    with pytest.raises(aw.AnywidthError, match="example"):
        aw.plan(Language())


def test_arguments_by_name_alone_are_refused() -> None:
    class Starred(nn.Linear):
        def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    with pytest.raises(aw.AnywidthError, match="by name only"):
        aw.plan(Starred(4, 4), x=torch.randn(2, 4))


def test_batches_of_other_forms(model: Any) -> None:
    """Weighted by the values that reach a norm, which are the samples here."""
    parts = [batch(8), batch(4, seed=1)]
    aw.calibrate(model, parts, WIDTHS)
    expected = aw.statistics_state(model)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    aw.calibrate(model, [("text", part) for part in parts], WIDTHS, forward=lambda m, b: m(**b[1]))
    torch.testing.assert_close(aw.statistics_state(model), expected)
    with pytest.raises(aw.AnywidthError, match="samples=5"):
        aw.calibrate(model, parts, WIDTHS, samples=5, forward=lambda m, b: m(**b))
