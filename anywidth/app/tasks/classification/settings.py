"""The settings of a classification run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch.nn.functional as F

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.model_spec import is_code
from anywidth.app.runs.settings import option
from anywidth.app.tasks.task_settings import WEIGHTS, TaskSettings
from anywidth.errors import AnywidthError
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.training.distillation import Distill, soft_cross_entropy
from anywidth.training.sampling import Sampling
from anywidth.training.step import Loss

NEED_A_FOLDER = ("fashion_mnist", "cifar10", "cifar100", "folder")
"""Data sets that need `data_dir`."""
_DISTILLING = ("distill", "temperature", "truth", "teacher")


@dataclass(frozen=True)
class ClassificationSettings(TaskSettings):
    """The settings of a classification run: the paper's defaults, except for balanced losses."""

    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 5  # earlier versions lack some fields
    places: ClassVar[tuple[str, ...]] = ("data_dir", "from_checkpoint")
    of_us_nets: ClassVar[tuple[str, ...]] = (
        *("rule", "widths_per_step", "density", "nonuniform", "lattice"),
        *_DISTILLING,
    )

    weights: Literal["paper", "balanced"] = option("balanced", WEIGHTS, earlier="paper")
    model: str = option(
        "mobilenet_v1",
        "mobilenet_v1, mobilenet_v2, torchvision:NAME, timm:NAME, package.module:function or "
        "path/to/file.py:function",
    )
    total_stride: int | None = option(
        None, "MobileNets: input size over feature size; 32 for 224 px, 16, or 8 for 32 px"
    )
    strides: tuple[int, ...] | None = option(
        None, "MobileNets: all five strides, such as 1,1,2,2,2, instead of total_stride"
    )
    multiplier: float = option(
        1.0, "MobileNets: share of the published channels at width 1.0", above=0, at_most=1
    )
    from_checkpoint: str | None = option(
        None, "start from the weights in this file (safetensors, or a state_dict of torch.save)"
    )
    sort_channels: bool = option(
        True, "from a checkpoint: put the most important channels first, for narrow widths"
    )
    zero_gamma: bool = option(
        False, "start residual branches at zero, by the scale of their last norm"
    )
    data: str = option(
        "bundled", "bundled, fashion_mnist, cifar10, cifar100, or folder (ImageNet's layout)"
    )
    data_dir: str | None = option(None, "folder of the data")
    image_size: int | None = option(
        None, "size of the crop from folder images, px", at_least=1, at_most=2**14
    )
    limit: int | None = option(None, "largest number of training images", at_least=1)
    validation: Literal["test", "split"] = option(
        "test", "validate on the test set, or on a tenth of the training set"
    )
    held_out: float = option(
        0.0, "share of the training images kept for `anywidth search`", at_least=0, at_most=0.5
    )
    workers: int | None = option(
        None,
        "processes that decode folder images; none is one per core",
        at_least=0,
        at_most=1024,
    )
    skip_corrupt: bool = option(False, "skip damaged image files")

    method: Literal["us", "s", "i"] = option(
        "us", "universally slimmable (us), a few switches (s), or one width (i)"
    )
    switches: tuple[float, ...] = option((0.25, 0.5, 0.75, 1.0), "the widths of an S-Net")
    private_affine: bool = option(False, "S-Net: separate batch-norm scales and biases per switch")
    rule: Literal["sandwich", "random", "min+random", "max+random"] = option(
        "sandwich", "how the widths of a step are drawn"
    )
    distill: bool = option(True, "inplace distillation")
    temperature: float = option(1.0, "temperature of the soft labels", above=0)
    truth: float = option(0.0, "share of true labels in distillation", at_least=0, at_most=1)
    average_outputs: bool = option(False, "output averaging")

    epochs: int = option(10, "passes over the training images", at_least=1)
    batch_size: int = option(128, "images per step, all ranks together", at_least=1)
    learning_rate: float = option(0.1, "highest learning rate", above=0)
    head_rate: float = option(
        1.0,
        "factor of the learning rate of the last layer; 0.1 for MobileNet v2 with few classes",
        above=0,
        at_most=1,
    )
    warmup_epochs: float = option(0.0, "epochs of warm-up", at_least=0)
    schedule: Literal["linear", "cosine"] = option(
        "linear", "how the learning rate falls to 0 after the warm-up"
    )
    gradient_clip: float | None = option(None, "largest norm of the gradients", above=0)
    momentum: float = option(0.9, "momentum of SGD (Nesterov)", at_least=0, below=1)
    weight_decay: float = option(
        1e-4, "weight decay of linear layers and of convolutions that are not depthwise", at_least=0
    )
    label_smoothing: float = option(
        0.0, "share of the label spread over all classes", at_least=0, below=1
    )
    flip: bool = option(True, "mirror training images at random")
    crop_padding: int = option(4, "random crop after padding, px", at_least=0)
    cutout: int = option(0, "side of a blanked square, px; 0 is off", at_least=0)

    calibration_samples: int | None = option(
        None, "training images for batch-norm statistics; none uses all", at_least=2
    )
    calibration_method: Literal["exact", "moving"] = option(
        "exact", "how batch-norm statistics are averaged"
    )
    calibration_augmented: bool = option(False, "calibrate on augmented images, as in training")
    evaluation_batch_size: int = option(500, "images per step of evaluation", at_least=1)
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "auto is bfloat16 on a GPU, float32 on a CPU"
    )
    kernels: bool = option(True, "on a GPU, use kernels that need no preparation for a new width")
    validate_every: int = option(1, "epochs between validations", at_least=1)
    log_every: int = option(20, "steps between rows of metrics.csv", at_least=1)
    checkpoint_every: int = option(200, "steps between checkpoints", at_least=1)

    @property
    def network(self) -> str:
        return self.model.rpartition(":")[2]

    @property
    def trained_on(self) -> str:
        if self.data in ARRAY_NAMES:
            return ARRAY_NAMES[self.data]
        return Path(self.data_dir or self.data).name

    def trained_widths(self) -> list[float]:
        """Every 0.025 of the range, or an S-Net's switches."""
        return sorted(self.switches) if self.method == "s" else spectrum_widths(self.low, self.high)

    def sampling(self) -> Sampling:
        if self.method == "us":
            return dataclasses.replace(super().sampling(), rule=self.rule)
        if self.method == "s":
            return Sampling("fixed", widths=self.switches, seed=self.seed)
        return super().sampling()

    def loss(self) -> Loss:
        return partial(F.cross_entropy, label_smoothing=self.label_smoothing)

    def distillation(self) -> Distill | None:
        """The loss of narrower widths besides the true labels, whose share is `truth`."""
        if self.method != "us" or "distill" in self.unread() or not self.distill:
            return None
        return partial(soft_cross_entropy, temperature=self.temperature)

    def check(self) -> None:
        super().check()
        if len(set(self.switches)) < max(1, len(self.switches)):
            raise AnywidthError(
                f"{self.given('switches')}: expected different widths, such as 0.25,0.5,1.0"
            )
        for switch in self.switches if self.method == "s" else ():
            self.width_range.fraction(switch)
        if self.total_stride not in (None, 8, 16, 32):
            raise AnywidthError(f"{self.given('total_stride')}: expected 8, 16 or 32")
        if self.strides is not None and (len(self.strides) != 5 or {*self.strides} - {1, 2}):
            raise AnywidthError(
                f"{self.given('strides')}: expected five numbers, each 1 or 2, such as 1,1,2,2,2"
            )
        if self.strides is not None and self.total_stride is not None:
            raise AnywidthError(
                f"{self.given('strides')} and {self.given('total_stride')}: both set strides; "
                "leave one out, or give --total-stride none"
            )
        starts = ("from_checkpoint", "from_run", "zero_gamma")
        if len(given := [name for name in starts if getattr(self, name)]) > 1:
            raise AnywidthError(
                f"{' and '.join(map(self.given, given))}: each sets the weights that "
                "training starts with; leave one out"
            )
        if self.from_checkpoint is not None and self.method == "i" and self.width != 1:
            raise AnywidthError(
                f"{self.given('from_checkpoint')} with {self.given('width')}: an I-Net of "
                "this width has fewer channels than the file; leave out --width"
            )
        if self.data_dir is not None and self.data not in NEED_A_FOLDER:
            raise AnywidthError(
                f"{self.given('data_dir')} has no effect with {self.given('data')}: leave out "
                f"--data-dir, or name its data set with --data {' | '.join(NEED_A_FOLDER)}"
            )

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.sampling().may_leave_out_widest:
            reason = f"{self.given('rule')}, which may leave out the widest width"
            found |= dict.fromkeys((*_DISTILLING, "weights"), reason)
        elif self.method == "us" and not self.distill:
            found |= dict.fromkeys(_DISTILLING[1:], self.given("distill"))
        if self.method != "s":
            found |= dict.fromkeys(("switches", "private_affine"), self.given("method"))
        if self.from_checkpoint is None:
            found["sort_channels"] = "no --from-checkpoint"
        if self.data not in ARRAY_NAMES:
            found |= dict.fromkeys(("crop_padding", "cutout"), "folders of images")
        if ":" in self.model:
            found |= dict.fromkeys(("total_stride", "strides", "multiplier"), self.given("model"))
        return found

    def named_code(self) -> str | None:
        return "model" if is_code(self.model) else None

    def anchored(self) -> Self:
        file, colon, function = self.model.rpartition(":")
        if file.endswith(".py") and not Path(file).is_absolute():
            absolute = Path(file).expanduser().absolute()
            return dataclasses.replace(self, model=f"{absolute}{colon}{function}").anchored()
        is_name = self.data in (*ARRAY_NAMES, "folder")
        if not is_name and self.data_dir is None and Path(self.data).is_dir():
            return dataclasses.replace(self, data="folder", data_dir=self.data).anchored()
        return super().anchored()
