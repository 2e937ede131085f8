"""Ready configurations: `anywidth train NAME` runs one, and its options change any field.

Each says its command, what it takes and what to expect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.super_resolution.task import SuperResolutionSettings
from anywidth.errors import AnywidthError

AnySettings = ClassificationSettings | SuperResolutionSettings | ReinforcementSettings
Recipe = Callable[[], AnySettings]

# MobileNet v2 and its range of widths in the paper.
V2: dict[str, Any] = {
    "model": "mobilenet_v2",
    "low": 0.35,
    "switches": (0.35, 0.5, 0.75, 1.0),
}


def fashion_mnist_demo() -> ClassificationSettings:
    """US-MobileNet v1 on 10,000 bundled Fashion-MNIST images: the default, for two CPU cores.

    Command: `anywidth train` (or `make run`). It trains for 5 to 6 minutes on two cores; top-1
    error 15.8 % at width 0.25 and 14.0 % at 1.0 (mean of three seeds, `benchmarks/demo.py`). In so
    short a schedule soft labels alone were worse: narrow widths learn from half true ones too.
    """
    return ClassificationSettings(
        model="mobilenet_v1",
        total_stride=16,
        data="bundled",
        epochs=6,
        batch_size=64,
        learning_rate=0.05,
        warmup_epochs=0.5,
        weight_decay=1e-3,
        truth=0.5,
        crop_padding=2,
        calibration_samples=2000,
    )


def cifar10_mobilenet_v1() -> ClassificationSettings:
    """US-MobileNet v1 on CIFAR-10, strides dropped for 32 px (total stride 8), for a GPU.

    Command: `anywidth train cifar10_mobilenet_v1 --data-dir DIR`. 7,760 steps of 15 ms on an
    H200. The full width has 5.6 % top-1 error (5.5 % trained alone, `--method i`) and width 0.25
    has 8.1 % (8.6 %, `--method i --width 0.25`), three seeds each. How it was tuned is in
    `docs/results.md`.
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
    """US-MobileNet v2 on CIFAR-10 with v1's settings but for the classifier, from 0.35, 40 epochs.

    Its total stride is 8 too, but the stage with 24 channels, whose expansions are the largest,
    already works at half the resolution; that saves a quarter of the memory traffic. A step still
    takes 1.4 times as long as v1's, which is why there are half as many epochs.

    The classifier reads 1,280 channels at every width and gets the gradients of four of them; at
    the full learning rate US-Nets collapse in the first steps, at a tenth of it they do not, and
    I-Nets do no worse (`docs/results.md`).

    Command: `anywidth train cifar10_mobilenet_v2 --data-dir DIR`. Measured with three seeds: 7.9 %
    top-1 error at 1.0 and 9.6 % at 0.35; trained alone (`--method i`), 7.6 % and 10.1 %.
    """
    return replace(
        cifar10_mobilenet_v1(),
        total_stride=None,
        strides=(1, 2, 1, 2, 2),
        epochs=40,
        head_rate=0.1,
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


def sr() -> SuperResolutionSettings:
    """US-WDSR with 16 channels and 3 blocks on bundled pictures, x2, for two CPU cores.

    Command: `anywidth train sr`. Two minutes on two cores; 25.3 dB at width 0.5 and 25.9 dB at 1.0
    on the bundled pictures, where bicubic upscaling has 23.4 dB. It starts as bicubic upscaling,
    with the deep branch at a tenth, and the learning rate is a cosine wave's after a warm-up.
    """
    return SuperResolutionSettings(
        channels=16,
        blocks=3,
        patch=24,
        batch_size=8,
        epochs=6,
        steps_per_epoch=200,
        warmup_steps=50,
    )


def sr_wdsr() -> SuperResolutionSettings:
    """US-WDSR as in the paper, any width from 32 to 64 channels, 8 blocks, x2, for a GPU.

    Not as in the paper: it starts as bicubic upscaling, with the deep branch at a tenth, and the
    learning rate is a cosine wave's after a warm-up.

    Command: `anywidth train sr_wdsr --data-dir PICTURES --eval-dir SETS`, where PICTURES is any
    folder of photos or DIV2K's, and SETS holds a folder for each of Set5, Set14 and the like. Not
    run here to the end.
    """
    return SuperResolutionSettings(epochs=60, steps_per_epoch=1000)


def rl() -> ReinforcementSettings:
    """US-PPO that plays MinAtar Breakout, for two CPU cores.

    Command: `anywidth train rl`. About two minutes on two idle cores, the games at five widths
    included; mean score 8.6 at width 0.25 and 8.7 at 1.0 (three seeds, `docs/reinforcement.md`).
    Random play scores 0.5, and an ordinary network sliced to 0.25 scores 1.1.
    """
    return ReinforcementSettings(
        environment="minatar:breakout",
        environments=32,
        rollout=32,
        steps=500_000,
        epochs=2,
        batch_size=256,
        learning_rate=2e-3,
        warmup_updates=300,
        entropy_weight=0.03,
        clip=0.2,
        validate_every=40,
        curve_games=16,
        evaluation_games=50,
        checkpoint_every=50,
    )


def rl_breakout() -> ReinforcementSettings:
    """US-PPO that plays BreakoutNoFrameskip-v4 with the paper's network, for a GPU and many cores.

    Command: `anywidth train rl_breakout`. PPO's settings are those its authors use for Atari, but
    for a short warm-up and twice the entropy, which narrower widths need (`docs/reinforcement.md`).
    Not run here to the end. With `--environments 16 --rollout 64 --steps 3000000`, the last part in
    bfloat16 on a CPU, it scores 84 at width 0.25 and 116 at 1.0, where networks trained alone
    score 16 and 84 (one seed).
    """
    return ReinforcementSettings(
        environment="atari:breakout",
        environments=8,
        clip_rewards=True,
        divisor=8,
        steps=10_000_000,
        rollout=128,
        epochs=4,
        batch_size=256,
        learning_rate=2.5e-4,
        warmup_updates=500,
        entropy_weight=0.02,
        clip=0.1,
        longest_game=10_000,
        validate_every=240,
        log_every=10,
        checkpoint_every=240,
    )


RECIPES: tuple[Recipe, ...] = (
    fashion_mnist_demo,
    cifar10_mobilenet_v1,
    cifar10_mobilenet_v2,
    imagenet_us_mobilenet_v1,
    imagenet_us_mobilenet_v2,
    imagenet_us_resnet50,
    sr,
    sr_wdsr,
    rl,
    rl_breakout,
)


def recipe(name: str) -> AnySettings:
    """The configuration of a recipe by its name."""
    found = {r.__name__: r for r in RECIPES}
    if name not in found:
        raise AnywidthError(f"no recipe {name!r}; there are {', '.join(found)}")
    return found[name]()
