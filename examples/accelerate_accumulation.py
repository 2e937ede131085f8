"""Train for all widths under Accelerate, with gradients accumulated over four batches.

python examples/accelerate_accumulation.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from bundled_images import images, show_errors, slimmable_network
from torch.utils.data import DataLoader

import anywidth as aw

ACCUMULATED = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True)
    model = slimmable_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = images(train=True, count=options.images)
    loader = DataLoader(data, batch_size=25, shuffle=True)
    # The network itself is not prepared: `step.reduce` averages its gradients once per update.
    optimizer, loader = accelerator.prepare(optimizer, loader)
    step = aw.SandwichStep(model.to(accelerator.device), optimizer, F.cross_entropy)
    for _ in range(options.epochs):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                step.backward(batch, labels, scale=1 / ACCUMULATED)
                if accelerator.sync_gradients:
                    step.reduce()
                optimizer.step()  # Accelerate passes over it until the last of four
                optimizer.zero_grad()
    show_errors(model)


if __name__ == "__main__":
    main()
