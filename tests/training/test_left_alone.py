"""What a step leaves alone: channels that no width trains, and modules in evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels
from torch import nn

import anywidth as aw

BATCH = images_and_labels(8)
DECAYING: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("range_ends", [True, False])
def test_channels_that_no_width_trains_keep_their_values(name: str, range_ends: bool) -> None:
    model: Any = converted(high=0.5 if range_ends else 1.0)
    before = model[4]._parameters["weight"].detach().clone()
    optimizer = DECAYING[name](model.parameters())
    widths = 4 if range_ends else aw.Sampling("fixed", widths=(0.25, 0.5))
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, widths=widths)
    for _ in range(2):
        step(*BATCH)
    step.backward(*BATCH)
    optimizer.step()
    after = model[4]._parameters["weight"]
    assert torch.equal(after[8:], before[8:])
    assert torch.equal(after[:, 8:], before[:, 8:])
    assert (after[:8, :8] != before[:8, :8]).all()


def test_a_loop_beside_the_step_trains_the_wider_channels() -> None:
    model: Any = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    aw.SandwichStep(model, optimizer, F.cross_entropy, widths=aw.Sampling("fixed", widths=(0.25,)))
    before = model[4].weight.detach().clone()
    F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    gradient = model[4].weight.grad
    optimizer.step()
    torch.testing.assert_close(model[4].weight, before - 0.1 * gradient)


def frozen(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("noted", ["when made", "at a step"])
def test_a_frozen_norm_stays_frozen_after_validation(noted: str) -> None:
    model: Any = converted()
    widths = (0.25, 1.0)
    aw.calibrate(model, [BATCH], widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    if noted == "when made":
        model[1].eval()
    fixed = aw.Sampling("fixed", widths=widths)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, widths=fixed)
    if noted == "at a step":
        model[1].eval()
        step(*BATCH)
    modes, mean = frozen(model), model[1].running_mean.clone()
    model.eval()
    step(*BATCH)
    assert frozen(model) == modes
    assert torch.equal(model[1].running_mean, mean)


def test_modes_that_the_user_has_mixed_stay() -> None:
    """The rest in evaluation mode, the classifier alone in training mode."""
    model: Any = converted()
    aw.calibrate(model, [BATCH], [0.25, 1.0])
    model.eval()
    model[9].train()
    fixed = aw.Sampling("fixed", widths=(0.25, 1.0))
    optimizer = torch.optim.SGD(model[9].parameters(), lr=0.1)
    modes = frozen(model)
    aw.SandwichStep(model, optimizer, F.cross_entropy, widths=fixed)(*BATCH)
    assert frozen(model) == modes


def test_a_model_in_evaluation_mode_is_put_in_training_mode() -> None:
    model = converted().eval()
    aw.SandwichStep(model, None, F.cross_entropy).backward(*BATCH)
    assert all(frozen(model))
