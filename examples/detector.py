"""Make a torchvision detector slimmable by its parts, train it, run it at any width.

python examples/detector.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import box_iou
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

import anywidth as aw

SIZE = 64
WIDTHS = [0.25, 0.5, 1.0]
Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


def rectangles(batches: int, seed: int) -> Iterator[Batch]:
    """Noisy images with one bright rectangle each, and its box."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        images, targets = [], []
        for _ in range(4):
            image = 0.3 * torch.rand(3, SIZE, SIZE, generator=generator)
            left, top = torch.randint(0, SIZE // 2, (2,), generator=generator).tolist()
            width, height = torch.randint(16, SIZE // 2, (2,), generator=generator).tolist()
            image[:, top : top + height, left : left + width] += 0.7
            box = torch.tensor([[left, top, left + width, top + height]], dtype=torch.float32)
            images.append(image)
            targets.append({"boxes": box, "labels": torch.tensor([1])})
        yield images, targets


@torch.no_grad()
def overlap(detector: nn.Module) -> float:
    """The mean overlap (IoU) of the best detection with the rectangle."""
    found = []
    for images, targets in rectangles(batches=4, seed=1):
        for detected, target in zip(detector(images), targets, strict=True):
            found.append(box_iou(detected["boxes"][:1], target["boxes"]).item())
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        norm_layer=nn.BatchNorm2d,
        trainable_layers=5,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(256, 256),
    )
    detector = FCOS(backbone, num_classes=2, min_size=SIZE, max_size=SIZE, score_thresh=0)
    # The code between these parts depends on values (which boxes to keep), so it is not planned.
    # What one part gives the other narrows too.
    images = [torch.rand(3, SIZE, SIZE) for _ in range(2)]
    plan = aw.plan(detector, images, parts=["backbone", "head"])
    aw.slimmable(detector, plan)
    left = aw.macs(plan, 0.25) / aw.macs(plan, 1.0)
    print(f"at width 0.25 it takes {left:.1%} of the multiply-adds")

    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3)
    step = aw.SandwichStep(detector, optimizer, lambda losses, _: sum(losses.values()), None)
    for images, targets in rectangles(options.steps, seed=0):
        result = step((images, targets))
    print(f"loss at full width: {result.losses[0].item():.2f}")

    batches = (images for images, _ in rectangles(batches=8, seed=2))
    aw.calibrate(detector, batches, WIDTHS, forward=lambda model, images: model(images))
    detector.eval()
    for width in WIDTHS:
        with aw.at_width(detector, width):
            print(f"width {width}: overlap {overlap(detector):.3f}")
    small = aw.extract(detector, 0.25)
    count = sum(p.numel() for p in small.parameters())
    print(f"extracted at 0.25: {count:,} parameters, overlap {overlap(small):.3f}")


if __name__ == "__main__":
    main()
