"""A network that was never trained runs at every width, as trainers validate before they train."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from tiny_networks import batches_of, converted, images_and_labels
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import anywidth as aw

IMAGES, LABELS = images_and_labels(8)
SAME: dict[str, Any] = {
    "converted": lambda model: model,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "replica": aw.replica,
    "moved": lambda model: model.double().float(),
}


def evaluated(model: nn.Module, width: float) -> Tensor:
    model.eval()
    with aw.at_width(model, width), torch.no_grad():
        return model(IMAGES)


@pytest.mark.parametrize("name", SAME)
def test_every_width_has_the_initial_statistics(name: str) -> None:
    model = SAME[name](converted())
    with pytest.warns(UserWarning, match="calibrated"):
        small = aw.extract(model.eval(), 0.5)
    torch.testing.assert_close(evaluated(model, 0.5), small(IMAGES))
    assert aw.calibrated_widths(model) == [1.0]


def narrow_pass(model: nn.Module) -> nn.Module:
    """Training that leaves no trace in statistics: only widths that are not tracked."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with aw.at_width(model.train(), 0.5):
        F.cross_entropy(model(IMAGES), LABELS).backward()
    optimizer.step()
    return model


def average(model: nn.Module) -> nn.Module:
    """Its norms never see a batch, and its weights are those of a trained network."""
    mean = AveragedModel(model)
    for _ in range(2):
        mean.update_parameters(narrow_pass(model))
    return mean.module


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(narrow_pass(copy.deepcopy(model)).state_dict())
    return model


def calibrated(model: nn.Module) -> nn.Module:
    aw.calibrate(model, batches_of([8]), [1.0])
    return model


def calibrated_elsewhere(model: nn.Module) -> nn.Module:
    aw.calibrate(model, batches_of([8]), [0.25])
    return model


def one_pass(model: nn.Module) -> nn.Module:
    model.train()(IMAGES)
    return model


@pytest.mark.parametrize(
    "change", [narrow_pass, average, loaded, calibrated, calibrated_elsewhere, one_pass]
)
def test_no_longer_new(change: Any) -> None:
    model = change(converted())
    with pytest.raises(aw.AnywidthError, match="calibrate"):
        evaluated(model, 0.5)


def test_trained_networks_are_not_new_when_they_are_converted() -> None:
    plain = aw.extract(converted(), 1.0)
    plain.train()(IMAGES)
    with pytest.raises(aw.AnywidthError, match="calibrate"):
        evaluated(converted(plain), 0.25)


class Validated(lightning.LightningModule):
    """Validates the ends, which training tracks, also before training: Lightning's sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = converted()
        self.losses: dict[float, list[float]] = {0.25: [], 1.0: []}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05)
        self.step = aw.SandwichStep(self.network, optimizer, F.cross_entropy)
        return optimizer

    def training_step(self, batch: list[Tensor]) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.step.backward(*batch)
        optimizer.step()

    def validation_step(self, batch: list[Tensor]) -> None:
        for width, losses in self.losses.items():
            with aw.at_width(self.network, width):
                losses.append(F.cross_entropy(self.network(batch[0]), batch[1]).item())


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")
def test_lightning_checks_validation_before_training() -> None:
    module = Validated()
    loader = DataLoader(TensorDataset(*images_and_labels(16)), batch_size=8)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", **options)
    trainer.fit(module, loader, loader)
    for losses in module.losses.values():
        assert len(losses) == 2 + 3 * 2, "two batches of the sanity check, two per epoch"
