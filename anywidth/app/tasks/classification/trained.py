"""A finished classifier: its data and network, evaluated, calibrated, judged and deployed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.data.augment import Augmentation
from anywidth.app.data.classification import (
    EVALUATION_RESIZE,
    ClassificationData,
    Epochs,
    load_classification,
)
from anywidth.app.data.image_reading import central_square, read_image
from anywidth.app.data.order import ImageLoader
from anywidth.app.runs.run import MEND, Run
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.trained import Example, Judging, Trained
from anywidth.distributed import rank, sum_over_ranks, world_size
from anywidth.errors import AnywidthError
from anywidth.json_values import listed, number, refuse, row, text, whole
from anywidth.measuring.progress import training_progress
from anywidth.measuring.spectra import STANDARD_ERROR, Metric, standard_error_of_share
from anywidth.slimming.convert import plan_of
from anywidth.training.calibration import calibrate
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.norm_tuning import tune_norms
from anywidth.training.statistics_state import statistics_to_tensors
from anywidth.translating.deployment import Deployment
from anywidth.width import Width

_JUDGED = 2000
"""The most images that a search judges a network by, and calibrates finalists with."""

# ---- data ----------------------------------------------------------------------------------------


def load_data(
    settings: ClassificationSettings, device: torch.device, *, shared: bool = False
) -> ClassificationData:
    """The data of a run; with `shared`, each rank gets its part of every batch."""
    augmentation: Any = Augmentation(settings.flip, settings.crop_padding, cutout=settings.cutout)
    if settings.data not in ARRAY_NAMES:
        from anywidth.app.data.folder_augment import FolderAugmentation

        augmentation = FolderAugmentation(flip=settings.flip)
    return load_classification(
        settings.data,
        settings.data_dir,
        batch_size=settings.batch_size,
        evaluation_batch_size=settings.evaluation_batch_size,
        augmentation=augmentation,
        seed=settings.seed,
        device=device,
        rank=rank() if shared else 0,
        world_size=world_size() if shared else 1,
        workers=settings.workers,
        image_size=settings.image_size,
        limit=settings.limit,
        validation=settings.validation,
        skip_corrupt=settings.skip_corrupt,
        held_out=settings.held_out,
    )


def calibration_images(
    data: ClassificationData, settings: ClassificationSettings, samples: int | None = None
) -> Any:
    """Training images for batch-norm statistics: `samples` random ones, or all."""
    loader: Any = data.calibration
    if settings.calibration_augmented:
        size = settings.evaluation_batch_size
        loader = data.train.subset(
            data.train.samples, settings.seed, batch_size=size, augmented=True
        )
    if samples is None or samples >= loader.samples:
        return loader
    return loader.subset(samples, seed=settings.seed, augmented=True)


MOST_CLASSES = 10

# More would not be made in any memory.
_MOST_PIXELS, _MOST_CHANNELS = 2**14, 2**10


def _positive(value: Any, at: str) -> float:
    found = number(value, at)
    return found if found > 0 else refuse(at, value, "a number above 0")


_SIDE = whole(1, _MOST_PIXELS)
_FIELDS = {
    "classes": listed(text),
    "input_shape": row(whole(1, _MOST_CHANNELS), _SIDE, _SIDE),
    "mean": listed(number),
    "std": listed(_positive),
}


def read_state(run: Run) -> dict[str, Any]:
    """`classes`, `input_shape`, `mean` and `std` of a finished run, which may be anyone's."""
    found = run.read_state(_FIELDS)
    channels = found["input_shape"][0]
    if not found["classes"] or not len(found["mean"]) == len(found["std"]) == channels:
        raise AnywidthError(
            f"{run.folder / 'finished.json'}: {len(found['classes'])} classes, and "
            f"{len(found['mean'])} means and {len(found['std'])} deviations for {channels} "
            f"channels; {MEND}"
        )
    return found


@torch.no_grad()
def evaluate(model: nn.Module, loader: ImageLoader, *, alone: bool = False) -> dict[str, float]:
    """Errors in percent with their standard errors, and loss over a loader, at the current width.

    With several ranks, all must call it, unless it is for this rank `alone`; each may have its part
    of the batches or all of them.
    """
    device = next(model.parameters()).device
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in loader:
        if len(labels) == 0:
            continue
        logits = model(images.contiguous(memory_format=torch.channels_last)).float()
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        totals += torch.stack(
            [
                top[:, 0].sum(),
                top.any(1).sum(),
                F.cross_entropy(logits, labels, reduction="sum"),
                torch.full((), len(labels), device=device),
            ]
        )
    top1, top5, loss, count = (totals if alone else sum_over_ranks(totals)).tolist()
    if count == 0:
        raise AnywidthError(
            "no validation image could be read: all of them are corrupt; replace them, or hold out "
            "training images with --validation split"
        )
    errors = {"top1_error": 100 * (1 - top1 / count), "top5_error": 100 * (1 - top5 / count)}
    spread = {
        name + STANDARD_ERROR: standard_error_of_share(error, count)
        for name, error in errors.items()
    }
    return {**errors, "loss": loss / count, **spread}


class Classifier(nn.Module):
    """Takes (N, C, H, W) images in [0, 1] and returns logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Any:
        return self.network((images - self.mean) / self.std)


@dataclass(frozen=True)
class TrainedClassifier(Trained):
    """A finished run: its trained network with statistics, and its data if loaded."""

    settings: ClassificationSettings
    data: ClassificationData | None = None

    metrics: ClassVar[Mapping[str, Metric]] = {
        "top1_error": Metric("top-1 error, %", 2, lower_is_better=True),
        "top5_error": Metric("top-5 error, %", 2, lower_is_better=True),
        "loss": Metric("loss", 4, lower_is_better=True),
    }
    curves: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "accuracy": "accuracy on the batch, %",
        "validation_error": "validation error, %",
    }

    def __post_init__(self) -> None:
        if next(self.model.parameters()).is_cuda:
            # Otherwise every new width costs seconds.
            use_kernels(self.model, self.settings.kernels)

    @staticmethod
    def network(run: Run, settings: ClassificationSettings) -> nn.Module:
        state = read_state(run)
        return build_model(settings, len(state["classes"]), state["input_shape"])

    @staticmethod
    def load_data(
        run: Run, settings: ClassificationSettings, device: torch.device
    ) -> ClassificationData:
        data = load_data(settings, device)
        run.check_data(data.facts(), {"classes": read_state(run)["classes"]})
        return data

    def judging(self, seed: int = 0) -> Judging:
        """By the loss, which is smoother than the error, on images kept out of training if any."""
        data = self._loaded()
        count = min(data.judging.samples, _JUDGED)
        images = data.judging.subset(
            count, seed, batch_size=min(count, self.settings.evaluation_batch_size)
        )
        kept = "kept out of training" if data.is_held_out else "that it was trained with"
        samples = min(self.settings.calibration_samples or _JUDGED, data.train.samples)
        has_norms = self.has_statistics
        return Judging(
            partial(evaluate, loader=images, alone=True),
            "loss",
            f"{count:,} training images {kept}",
            data.is_held_out,
            calibration_images(data, self.settings, samples) if has_norms else None,
        )

    def calibrate(
        self, widths: Sequence[Width], samples: int | None = None, method: str | None = None
    ) -> int:
        """Compute statistics for some widths and save them; returns the number of images.

        With several ranks, all must call it: the widths are divided among them.
        """
        if samples is None:
            samples = self.settings.calibration_samples
        if samples is not None and samples < 2:
            raise AnywidthError(f"--samples {samples}: batch statistics need at least 2")
        loader = calibration_images(self._loaded(), self.settings, samples)
        chosen: Any = method or self.settings.calibration_method
        own = [self.own_width(width) for width in widths]
        networks = len({plan_of(self.model).resolve(width) for width in own})
        mine = math.ceil(networks / world_size())
        with training_progress(len(loader) * mine, description="calibrating") as shown:
            calibrate(
                self.model,
                loader,
                own,
                method=chosen,
                progress=shown.update,
                process_group="world",
            )
        if rank() == 0:
            statistics = statistics_to_tensors(self.model)
            self.run.save_statistics(*statistics, model=self.model.state_dict())
        return int(loader.samples)

    def tune(self, widths: Sequence[float], epochs: int, learning_rate: float) -> int:
        """Tune scales and biases for some widths as narrower widths were trained, and save them."""
        settings, data = self.settings, self._loaded()
        loader = Epochs(data.train)
        with training_progress(epochs * len(loader), description="tuning") as shown:
            tune_norms(
                self.model,
                loader,
                [self.own_width(width) for width in widths],
                settings.loss(),
                settings.distillation(),
                epochs=epochs,
                learning_rate=learning_rate,
                truth=settings.truth,
                calibration=calibration_images(data, settings, settings.calibration_samples),
                progress=shown.update,
            )
        self.run.save_statistics(*statistics_to_tensors(self.model))
        return epochs * data.train.samples

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return evaluate(model, self._loaded().validation)

    @property
    def measured_on(self) -> str:
        kind = "held-out" if self.settings.validation == "split" else "test"
        return f"{self._loaded().validation.samples:,} {kind} images of {self.settings.trained_on}"

    def predict(self, image: Path, top: int = 5) -> list[tuple[str, float]]:
        """The most likely classes of an image file, with probabilities, at the current width."""
        state = read_state(self.run)
        pixels = _read(image, state["input_shape"], crops=self.settings.data not in ARRAY_NAMES)
        mean, std = (torch.tensor(state[name]).view(-1, 1, 1) for name in ("mean", "std"))
        batch = ((pixels.float() / 255 - mean) / std)[None]
        with torch.no_grad():
            logits = self.model(batch.to(next(self.model.parameters()).device))
        if not logits.isfinite().all():
            raise AnywidthError(
                f"{image}: the network of {self.run.folder} answers NaN or infinity, so its "
                "weights or statistics are of no use; calibrate it again, or train again"
            )
        likely = logits.float().softmax(1)[0].topk(min(top, logits.shape[1]))
        return [
            (state["classes"][i], p)
            for p, i in zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
        ]

    def deployment(self) -> Deployment:
        state = read_state(self.run)
        return Deployment(
            (torch.rand(2, *state["input_shape"]),),
            ("images",),
            ("logits",),
            ({0: "batch"},),
            takes="images in [0, 1]",
            facts={"classes": json.dumps(state["classes"]), **self._cropping()},
            task=self.settings.task,
            wrap=lambda network: Classifier(network, state["mean"], state["std"]),
        )

    def _cropping(self) -> dict[str, str]:
        """How a client prepares images: photos are cropped as in validation, others are not."""
        if self.settings.data in ARRAY_NAMES:
            return {}
        height = read_state(self.run)["input_shape"][1]
        return {"shorter_side": str(round(height * EVALUATION_RESIZE))}

    def examples(self) -> list[Example]:
        """The first validation image of each class, for up to ten classes."""
        if self.data is None:
            return []
        classes, first = self.data.classes, dict[int, torch.Tensor]()
        wanted = min(MOST_CLASSES, len(classes))
        for images, labels in self.data.validation:
            for image, label in zip(images.cpu(), labels.tolist(), strict=True):
                first.setdefault(label, image)
            if len(first) >= wanted:
                break
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (self.data.mean, self.data.std))
        found = []
        for label, image in sorted(first.items())[:wanted]:
            levels = ((image.float() * std + mean).clamp(0, 1) * 255 + 0.5).to(torch.uint8)
            found.append(Example(classes[label], levels.permute(1, 2, 0).numpy()))
        return found

    def _loaded(self) -> ClassificationData:
        if self.data is None:
            raise AnywidthError(f"the data of {self.run.folder} was not loaded")
        return self.data


def _read(image: Path, shape: tuple[int, int, int], crops: bool) -> Tensor:
    """The image preprocessed as in validation: photos are cropped to their middle."""
    from torchvision.transforms.functional import pil_to_tensor

    channels, height, width = shape
    picture = read_image(image, "L" if channels == 1 else "RGB")
    if crops:
        picture = central_square(picture, height, round(height * EVALUATION_RESIZE))
    else:
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels: Tensor = pil_to_tensor(picture)
    return pixels
