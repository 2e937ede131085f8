"""One recipe per task and data set, the same for I-, S- and US-Nets; classifiers' tuned on I-Nets.

There is one exception: on CIFAR-10 the classifier of MobileNet v2 learns at a tenth of the learning
rate, because US-Nets collapse otherwise. I-Nets trained this way are no worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anywidth.app.runs.settings import override
from anywidth.app.studies.study_parts import Network
from anywidth.app.tasks.classification.recipes import (
    cifar10_mobilenet_v1,
    cifar10_mobilenet_v2,
    imagenet_us_mobilenet_v1,
)
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.reinforcement.recipes import rl, rl_breakout
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.super_resolution.recipes import sr, sr_wdsr
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.errors import AnywidthError


def study_recipe(
    data: str,
    network: Network,
    data_dir: Path | None = None,
    epochs: int | None = None,
    device: str = "auto",
    changes: Mapping[str, str] | None = None,
) -> TaskSettings:
    """The settings that all trainings of a network on a data set share.

    The losses of the widths are summed, and the widths are those of the tables, as in the paper.
    `changes` are fields to change, as text; the study's own settings are applied after them.
    """
    known = DATA[network.task]
    if data not in known:
        raise AnywidthError(f"--data {data!r}: expected one of {', '.join(known)}")
    recipe = replace(known[data](network), low=network.widths[0], device=device, weights="paper")
    given: dict[str, Any] = {}
    if isinstance(recipe, ClassificationSettings):
        given |= {"model": network.name, "switches": network.widths}
    if "data_dir" in recipe.places:
        if data != "bundled" and data_dir is None:
            raise AnywidthError(f"--data {data} needs --data-dir, the folder of the data")
        given["data_dir"] = None if data_dir is None else str(data_dir)
    if epochs is not None:
        if isinstance(recipe, ReinforcementSettings):
            raise AnywidthError(
                f"--epochs {epochs}: reinforcement learning has agent steps; use --set steps=N"
            )
        given["epochs"] = epochs
    return override(replace(recipe, **given), changes or {})


def bundled(network: Network) -> ClassificationSettings:
    """The recipe for bundled images: `main` takes less than half an hour on two CPU cores.

    Tuned with 4 epochs by the error of I-Nets on a held-out tenth of the training images, one seed
    each: learning rates 0.05 and 0.1 (MobileNet v1 at 0.25, 0.5 and 1.0: 19.7, 17.0, 15.1 % and
    17.2, 14.8, 16.6 %; v2 at 0.35: 16.6 and 16.1 %); batches of 32 with half the rate (16.1 % at
    0.25 and 0.5, a fifth slower); total stride 32 with twice the epochs in the same time (v1 15.3 %
    at 0.25 and 18.5 % at 1.0, but v2 21.8 % at 0.35); weight decay 1e-3 and 3e-3 (no difference).
    Then with 5 epochs, a tenth of the learning rate for the classifier or the full rate, mean of
    four widths: v1 15.1 and 14.9 %, v2 14.0 and 17.3 %. Therefore v2 uses a tenth.
    """
    return ClassificationSettings(
        data="bundled",
        total_stride=16,
        epochs=5,
        batch_size=64,
        learning_rate=0.1,
        head_rate=0.1 if network.name == "mobilenet_v2" else 1.0,
        warmup_epochs=0.5,
        weight_decay=1e-3,
        crop_padding=2,
        calibration_samples=2000,
        validate_every=100,
    )


def cifar10(network: Network) -> ClassificationSettings:
    """`cifar10_mobilenet_v1` or `_v2`, with strides for 32 px (total stride 8), made for a GPU.

    Calibration uses a fifth of the training images, augmented as in training. With images as they
    are, which the networks know by heart, I-Nets were 0.2 to 1.2 points worse than with the
    statistics tracked in training; with augmented images they were within 0.15 points.

    Tuned by the error of full-width I-Nets on a held-out tenth of the training images, among 19
    settings for MobileNet v1 and six for v2; `docs/results.md` lists them. Four of the six are
    alike; v2 uses the one with the slower classifier, because US-Nets collapse with the others.

    Narrow widths learn from soft labels alone, as in the paper, also those of v2, whose recipe has
    half true labels.
    """
    ready = {"mobilenet_v1": cifar10_mobilenet_v1, "mobilenet_v2": cifar10_mobilenet_v2}
    return replace(
        ready[network.name](),
        truth=0.0,
        calibration_samples=10_000,
        evaluation_batch_size=1000,
        validate_every=10,
    )


DATA: dict[str, dict[str, Callable[[Network], TaskSettings]]] = {
    "classification": {
        "bundled": bundled,
        "cifar10": cifar10,
        "folder": lambda network: imagenet_us_mobilenet_v1(),
    },
    "super_resolution": {"bundled": lambda network: sr(), "pictures": lambda network: sr_wdsr()},
    "reinforcement": {"bundled": lambda network: rl(), "atari": lambda network: rl_breakout()},
}
"""Task → name of its data → recipe."""
