"""Every choice of a classification run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.runs.settings import option
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.errors import AnywidthError
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.training.sampling import Sampling

LIE_SOMEWHERE = ("fashion_mnist", "cifar10", "cifar100", "folder")
"""The data that `data_dir` is for."""
_DISTILLING = ("distill", "temperature", "truth")


@dataclass(frozen=True)
class ClassificationSettings(TaskSettings):
    """Every choice of a classification run; the defaults are the paper's where it has them."""

    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 3  # versions 1 and 2 lack some fields
    places: ClassVar[tuple[str, ...]] = ("data_dir",)
    of_us_nets: ClassVar[tuple[str, ...]] = (
        *("rule", "widths_per_step", "nonuniform", "lattice"),
        *_DISTILLING,
    )

    model: str = option(
        "mobilenet_v1", "a name of the zoo, torchvision:NAME, timm:NAME or package.module:function"
    )
    total_stride: int | None = option(
        None, "of the zoo's networks: 32 for 224 px, 16, or 8 for 32 px"
    )
    strides: tuple[int, ...] | None = option(
        None, "of the zoo's networks, instead: their five strides, such as 1,1,2,2,2"
    )
    data: str = option(
        "bundled", "bundled, fashion_mnist, cifar10, cifar100, or folder (ImageNet's layout)"
    )
    data_dir: str | None = option(None, "where the data lies")
    image_size: int | None = option(None, "crop of folder images, px", at_least=1)
    limit: int | None = option(None, "use only so many training images", at_least=1)
    validation: Literal["test", "split"] = option(
        "test", "the test set, or a tenth split from the training set"
    )
    workers: int = option(8, "processes that decode folder images", at_least=0)
    skip_corrupt: bool = option(False, "skip image files that are damaged")

    method: Literal["us", "s", "i"] = option(
        "us", "universally slimmable, switches only, or one width alone"
    )
    switches: tuple[float, ...] = option((0.25, 0.5, 0.75, 1.0), "the widths of an S-Net")
    private_affine: bool = option(False, "S-Net: a batch-norm scale and bias for each switch")
    rule: Literal["sandwich", "random", "min+random", "max+random"] = option(
        "sandwich", "how the widths of a step are drawn"
    )
    nonuniform: bool = option(False, "each group draws its own width")
    distill: bool = option(True, "inplace distillation")
    temperature: float = option(1.0, "of the soft labels", above=0)
    truth: float = option(0.0, "share of true labels in distillation", at_least=0, at_most=1)
    average_outputs: bool = option(False, "output averaging")

    epochs: int = option(10, "passes over the training images", at_least=1)
    batch_size: int = option(128, "images per step, all ranks together", at_least=1)
    learning_rate: float = option(0.1, "at its highest", above=0)
    head_rate: float = option(
        1.0,
        "share of the learning rate for the last layer; 0.1 for MobileNet v2, few classes",
        above=0,
        at_most=1,
    )
    warmup_epochs: float = option(0.0, "rise to it over so many epochs", at_least=0)
    momentum: float = option(0.9, "of SGD, nesterov", at_least=0, below=1)
    weight_decay: float = option(
        1e-4, "on linear weights and convolutions that are not depthwise", at_least=0
    )
    label_smoothing: float = option(
        0.0, "share of true labels spread over all classes", at_least=0, below=1
    )
    flip: bool = option(True, "mirror training images at random")
    crop_padding: int = option(4, "random crop after padding, px", at_least=0)
    cutout: int = option(0, "side of a square cut out, px", at_least=0)

    calibration_samples: int | None = option(
        None, "training images for batch-norm statistics; none takes all", at_least=2
    )
    calibration_method: Literal["exact", "moving"] = option("exact", "how they are averaged")
    calibration_augmented: bool = option(
        False, "over images augmented as in training, not as they are"
    )
    evaluation_batch_size: int = option(500, "images per step, evaluating", at_least=1)
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "auto is bfloat16 on a GPU, float32 on a CPU"
    )
    kernels: bool = option(True, "on a GPU: kernels that need no preparing for a new width")
    validate_every: int = option(1, "epochs between validations", at_least=1)
    log_every: int = option(20, "steps between rows of metrics.csv", at_least=1)
    checkpoint_every: int = option(200, "steps between checkpoints", at_least=1)

    @property
    def network(self) -> str:
        return self.model.rpartition(":")[2]

    @property
    def trained_on(self) -> str:
        return self.data

    def trained_widths(self) -> list[float]:
        """Every 0.025 of the range, or an S-Net's switches."""
        return sorted(self.switches) if self.method == "s" else spectrum_widths(self.low, self.high)

    def sampling(self) -> Sampling:
        if self.method == "us":
            return Sampling(
                self.rule, self.widths_per_step, self.nonuniform, self.lattice, seed=self.seed
            )
        if self.method == "s":
            return Sampling("fixed", widths=self.switches, seed=self.seed)
        return super().sampling()

    def check(self) -> None:
        super().check()
        if len(set(self.switches)) < max(1, len(self.switches)):
            raise AnywidthError(
                f"switches={self.switches}: expected widths that differ, such as 0.25,0.5,1.0"
            )
        for switch in self.switches if self.method == "s" else ():
            self.width_range.fraction(switch)
        if self.total_stride not in (None, 8, 16, 32):
            raise AnywidthError(f"total_stride={self.total_stride}: expected 8, 16 or 32")
        if self.strides is not None and (len(self.strides) != 5 or {*self.strides} - {1, 2}):
            raise AnywidthError(
                f"strides={self.strides}: expected five of 1 or 2, such as 1,1,2,2,2"
            )
        if self.strides is not None and self.total_stride is not None:
            raise AnywidthError(
                f"strides={self.strides} and total_stride={self.total_stride} say the same: leave "
                "one out, or set total_stride to none"
            )
        if self.data_dir is not None and self.data not in LIE_SOMEWHERE:
            raise AnywidthError(
                f"data_dir={self.data_dir!r} is not read with data={self.data!r}: leave out "
                f"--data-dir, or say what lies there with --data {' | '.join(LIE_SOMEWHERE)}"
            )

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.method == "us" and self.rule in ("random", "min+random"):
            found |= dict.fromkeys(_DISTILLING, f"rule={self.rule!r}, which draws no widest width")
        elif self.method == "us" and not self.distill:
            found |= dict.fromkeys(_DISTILLING[1:], "distill=False")
        if self.method != "s":
            found |= dict.fromkeys(("switches", "private_affine"), f"method={self.method!r}")
        if self.data not in ARRAY_NAMES:
            found |= dict.fromkeys(("crop_padding", "cutout"), "folders of images")
        if ":" in self.model:
            found |= dict.fromkeys(("total_stride", "strides"), f"model={self.model!r}")
        return found

    def anchored(self) -> Self:
        is_name = self.data in (*ARRAY_NAMES, "folder")
        if not is_name and self.data_dir is None and Path(self.data).is_dir():
            return dataclasses.replace(self, data="folder", data_dir=self.data).anchored()
        return super().anchored()
