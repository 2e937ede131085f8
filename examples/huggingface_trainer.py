"""Train for all widths with Hugging Face's Trainer.

python examples/huggingface_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from bundled_images import images, show_errors, slimmable_network
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import anywidth as aw


class SandwichTrainer(Trainer):
    """Adds the gradients of all widths; Trainer itself clips, steps and clears."""

    step: aw.SandwichStep | None = None

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any) -> Tensor:
        if self.step is None:
            self.step = aw.SandwichStep(self.model, self.optimizer, F.cross_entropy)
        batch = self._prepare_inputs(inputs)
        share = 1 / self.args.gradient_accumulation_steps
        result = self.step.backward(batch["images"], batch["labels"], scale=share)
        return result.losses[0] * share


class Shirts(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.images, self.labels = images(train=True, count=count).tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    model = slimmable_network()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=25,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            optim="adamw_torch",
            use_cpu=True,
            remove_unused_columns=False,  # the columns are the network's, not those of `forward`
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        SandwichTrainer(model, arguments, train_dataset=Shirts(options.images)).train()
    show_errors(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
