"""Ready settings: `anywidth train NAME` uses one, and options change any field.

Each docstring has the command, the time it takes and the result to expect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anywidth.app.tasks.classification.settings import ClassificationSettings

# MobileNet v2 with the widths of the paper.
V2: dict[str, Any] = {
    "model": "mobilenet_v2",
    "low": 0.35,
    "switches": (0.35, 0.5, 0.75, 1.0),
}


def fashion_mnist_demo() -> ClassificationSettings:
    """US-MobileNet v1 with half of its channels on 10,000 bundled Fashion-MNIST images.

    The default, for two CPU cores. Command: `anywidth train` (or `make run`). Widths from 0.1 to
    1.0 span a factor of 67 in multiply-adds, so that its curve shows what a width costs and gains.
    The losses of the widths are balanced, the labels of narrow widths are half true, and narrow
    widths are drawn more often: in so short a time the paper's choices are worse.
    """
    return ClassificationSettings(
        model="mobilenet_v1",
        multiplier=0.5,
        total_stride=16,
        low=0.1,
        divisor=2,
        density="log-uniform",
        data="bundled",
        epochs=10,
        batch_size=64,
        learning_rate=0.1,
        warmup_epochs=0.5,
        weight_decay=1e-3,
        truth=0.5,
        crop_padding=2,
        calibration_samples=2000,
    )


def cifar10_mobilenet_v1() -> ClassificationSettings:
    """US-MobileNet v1 on CIFAR-10, with total stride 8 for 32 px, for a GPU.

    Command: `anywidth train cifar10_mobilenet_v1 --data-dir DIR`. 7,760 steps of 15 ms on an
    H200. The full width has 5.6 % top-1 error (5.5 % trained alone, `--method i`) and width 0.25
    has 8.0 % (8.6 %, `--method i --width 0.25`), three seeds each; 5.6 and 8.1 % with the paper's
    sum of losses (`--weights paper`). `docs/results.md` says how the settings were tuned.
    """
    return ClassificationSettings(
        model="mobilenet_v1",
        total_stride=8,
        data="cifar10",
        epochs=80,
        batch_size=512,
        learning_rate=0.4,
        warmup_epochs=2,
        weight_decay=1e-3,
        crop_padding=4,
        cutout=12,
        calibration_augmented=True,
        log_every=50,
        checkpoint_every=1000,
    )


def cifar10_mobilenet_v2() -> ClassificationSettings:
    """US-MobileNet v2 on CIFAR-10 from width 0.35, 40 epochs, with a slower classifier, for a GPU.

    Its total stride is 8 too, but the stage with 24 channels, whose expansions are the largest,
    already has half the resolution, which saves a quarter of the memory traffic. A step still takes
    1.4 times as long as a step of v1, so there are half as many epochs.

    The classifier reads 1,280 channels at every width and gets the gradients of four widths. At the
    full learning rate US-Nets collapse in the first steps; at a tenth of it they do not, and I-Nets
    are no worse (`docs/results.md`).

    The labels of narrow widths are half true: on held-out training images the mean error was the
    lowest of three settings, 8.1 %; with soft labels alone it was 8.7 %. With one seed this is
    within noise (`docs/results.md`).

    Command: `anywidth train cifar10_mobilenet_v2 --data-dir DIR`. Top-1 error at 1.0 and 0.35,
    three seeds: 7.3 and 9.1 %; 7.6 and 10.1 % trained alone (`--method i`); 7.9 and 9.6 % with the
    paper's losses (`--weights paper --truth 0`). With soft labels alone (`--truth 0`) they are 7.5
    and 9.2 %, two seeds.
    """
    return replace(
        cifar10_mobilenet_v1(),
        total_stride=None,
        strides=(1, 2, 1, 2, 2),
        epochs=40,
        head_rate=0.1,
        truth=0.5,
        **V2,
    )


def imagenet_us_mobilenet_v1() -> ClassificationSettings:
    """US-MobileNet v1 on ImageNet with the paper's settings.

    Command, with `--data-dir DIR`:
    `torchrun --nproc-per-node 8 -m anywidth train imagenet_us_mobilenet_v1`.
    Not run here: the paper reports 28.2 % error at 1.0 and 44.3 % at 0.25 after 250 epochs.
    """
    return ClassificationSettings(
        model="mobilenet_v1",
        data="folder",
        image_size=224,
        epochs=250,
        batch_size=1024,
        learning_rate=0.5,
        weight_decay=1e-4,
        weights="paper",
        evaluation_batch_size=1000,
        log_every=50,
        checkpoint_every=1000,
    )


def imagenet_us_mobilenet_v2() -> ClassificationSettings:
    """US-MobileNet v2 on ImageNet with the paper's settings, from width 0.35.

    Command, with `--data-dir DIR`:
    `torchrun --nproc-per-node 8 -m anywidth train imagenet_us_mobilenet_v2`.
    Not run here: the paper reports 28.5 % error at 1.0 and 37.8 % at 0.35 after 250 epochs.
    """
    return replace(imagenet_us_mobilenet_v1(), **V2)


def imagenet_us_resnet50() -> ClassificationSettings:
    """US-ResNet-50 (torchvision's) on ImageNet.

    Command: `torchrun --nproc-per-node 8 -m anywidth train imagenet_us_resnet50 --data-dir DIR`.
    Not run here, and not in the paper's tables.
    """
    return replace(
        imagenet_us_mobilenet_v1(),
        model="torchvision:resnet50",
        epochs=100,
        learning_rate=0.4,
        warmup_epochs=5,
        evaluation_batch_size=500,
    )


RECIPES = (
    fashion_mnist_demo,
    cifar10_mobilenet_v1,
    cifar10_mobilenet_v2,
    imagenet_us_mobilenet_v1,
    imagenet_us_mobilenet_v2,
    imagenet_us_resnet50,
)
