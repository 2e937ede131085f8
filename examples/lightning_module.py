"""Train for all widths with Lightning, and keep the statistics in its checkpoints.

python examples/lightning_module.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from bundled_images import images, show_errors, slimmable_network
from torch import Tensor
from torch.utils.data import DataLoader

import anywidth as aw


class AnyWidth(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # `step.backward` runs all widths
        self.network = slimmable_network()
        self.resumed: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.step = aw.SandwichStep(self.network, optimizer, F.cross_entropy)
        return optimizer

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        result = self.step.backward(*batch)
        self.step.reduce()  # over ranks; does nothing in one process
        optimizer.step()
        self.log("loss_widest", result.losses[0], prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["statistics"] = aw.statistics_state(self.network)
        checkpoint["sandwich_steps"] = self.step.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resumed = checkpoint  # the weights are loaded after this

    def on_train_start(self) -> None:
        if self.resumed:
            aw.load_statistics_state(self.network, self.resumed["statistics"])
            self.step.count = self.resumed["sandwich_steps"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    module = AnyWidth()
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = images(train=True, count=options.images)
    trainer.fit(module, DataLoader(data, batch_size=50, shuffle=True))
    show_errors(module.network)


if __name__ == "__main__":
    main()
