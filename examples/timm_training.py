"""Train a timm network for all widths with timm's mixup, optimiser, schedule and averaged weights.

python examples/timm_training.py
"""

from __future__ import annotations

import argparse

import timm
import torch
from bundled_images import images, show_errors
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader

import anywidth as aw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    widths = aw.WidthRange(0.25, 1.0, divisor=8)
    aw.slimmable(model, None, widths, example_input=torch.randn(2, 1, 28, 28))
    average = ModelEmaV3(model, decay=0.98)

    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=1e-4)
    data = images(train=True, count=options.images)
    loader = DataLoader(data, batch_size=50, shuffle=True, drop_last=True)
    schedule = CosineLRScheduler(optimizer, t_initial=options.epochs * len(loader))
    mixup = Mixup(mixup_alpha=0.2, num_classes=10)
    step = aw.SandwichStep(model, optimizer, SoftTargetCrossEntropy())
    for _ in range(options.epochs):
        for batch, labels in loader:
            step(*mixup(batch, labels))
            average.update(model)
            schedule.step_update(step.count)

    # The averaged weights have no statistics of their own until they are calibrated.
    show_errors(average.module)


if __name__ == "__main__":
    main()
