"""Train a torchvision network for all widths with your own training loop.

    python examples/own_model.py

The script makes an unmodified torchvision network slimmable, trains it with the loop below on
Fashion-MNIST images that come with the package, calibrates it, runs it at several widths, and
extracts one width as a plain network. It takes about a minute on one idle CPU core.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.data.arrays import load_arrays


def load(train: bool, count: int) -> tuple[Tensor, Tensor]:
    """Images for torchvision's networks: three channels, about unit variance."""
    arrays = load_arrays("bundled", None, train=train)
    images = (arrays.images[:count].float() / 255 - 0.29) / 0.35
    images = F.interpolate(images, scale_factor=2).repeat(1, 3, 1, 1)
    return images.to(memory_format=torch.channels_last), arrays.labels[:count]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, batch_size: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    step = 0
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(batch_size):
            optimizer.zero_grad()
            teacher = None
            for width in aw.sample_widths(model, step):
                with aw.at_width(model, width):
                    logits = model(images[batch])
                if teacher is None:
                    loss, teacher = F.cross_entropy(logits, labels[batch]), logits.detach()
                else:
                    loss = aw.soft_cross_entropy(logits, teacher)
                loss.backward()
            optimizer.step()
            step += 1


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    correct = [
        (model(part).argmax(1) == truth).float()
        for part, truth in zip(images.split(250), labels.split(250), strict=True)
    ]
    return 100 * torch.cat(correct).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000, help="training images")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load(train=True, count=options.images)

    model = torchvision.models.mobilenet_v3_small(num_classes=10)
    plan = aw.plan(model, images[:2])
    elastic, layers = plan.elastic_layers()
    print(f"{elastic} of {layers} layers can be narrowed")
    aw.slimmable(model, plan, aw.WidthRange(0.5, 1.0, divisor=8))

    train(model, images, labels, options.epochs, options.batch_size)

    widths = [0.5, 0.6, 0.8, 1.0]
    aw.calibrate(model, images.split(options.batch_size), widths)
    model.eval()
    test_images, test_labels = load(train=False, count=2000)
    for width in widths:
        with aw.at_width(model, width):
            right = accuracy(model, test_images, test_labels)
        print(f"width {width}: {aw.macs(model, width) / 1e6:5.2f} M multiply-adds, {right:.1f} %")

    small = aw.extract(model, 0.6, fold=True)
    print(f"extracted at 0.6: {sum(p.numel() for p in small.parameters()):,} parameters,",
          f"{accuracy(small, test_images, test_labels):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
