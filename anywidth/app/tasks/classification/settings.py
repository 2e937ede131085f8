"""Every choice of a classification run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anywidth.app.data.arrays import ARRAY_NAMES
from anywidth.app.runs.settings import about, check_ranges
from anywidth.app.tasks.width_choices import check_widths
from anywidth.errors import AnywidthError
from anywidth.width import WidthRange

LIE_SOMEWHERE = ("fashion_mnist", "cifar10", "cifar100", "folder")
"""The data that `data_dir` is for."""


@dataclass(frozen=True)
class ClassificationSettings:
    """Every choice of a classification run; the defaults are the paper's where it has them."""

    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 3  # versions 1 and 2 lack some fields

    model: str = field(
        default="mobilenet_v1",
        metadata=about("a name of the zoo, torchvision:NAME, timm:NAME or package.module:function"),
    )
    total_stride: int | None = field(
        default=None,
        metadata=about("of the zoo's networks: 32 for 224 px, 8 for 32 px", one_of=(8, 16, 32)),
    )
    strides: tuple[int, ...] | None = field(
        default=None,
        metadata=about(
            "of the zoo's networks, instead: their five strides, such as 1,1,2,2,2", one_of=(1, 2)
        ),
    )
    data: str = field(
        default="bundled",
        metadata=about("bundled, fashion_mnist, cifar10, cifar100, or folder (ImageNet's layout)"),
    )
    data_dir: str | None = field(default=None, metadata=about("where the data lies"))
    image_size: int | None = field(
        default=None, metadata=about("crop of folder images, px", at_least=1)
    )
    limit: int | None = field(
        default=None, metadata=about("use only so many training images", at_least=1)
    )
    validation: Literal["test", "split"] = field(
        default="test", metadata=about("the test set, or a tenth split from the training set")
    )
    workers: int = field(
        default=8, metadata=about("processes that decode folder images", at_least=0)
    )
    skip_corrupt: bool = field(default=False, metadata=about("skip image files that are damaged"))

    method: Literal["us", "s", "i"] = field(
        default="us", metadata=about("universally slimmable, switches only, or one width alone")
    )
    low: float = field(
        default=0.25, metadata=about("narrowest width (the paper's k0)", above=0, at_most=1)
    )
    high: float = field(default=1.0, metadata=about("widest width", above=0, at_most=1))
    divisor: int = field(
        default=8, metadata=about("channels are multiples of this (d)", at_least=1)
    )
    width: float = field(
        default=1.0, metadata=about("the one width of an I-Net", above=0, at_most=1)
    )
    switches: tuple[float, ...] = field(
        default=(0.25, 0.5, 0.75, 1.0), metadata=about("the widths of an S-Net", above=0, at_most=1)
    )
    private_affine: bool = field(
        default=False, metadata=about("S-Net: a batch-norm scale and bias for each switch")
    )
    widths_per_step: int = field(
        default=4, metadata=about("widths trained each step (n)", at_least=1)
    )
    rule: Literal["sandwich", "random", "min+random", "max+random"] = field(
        default="sandwich", metadata=about("how they are drawn")
    )
    nonuniform: bool = field(default=False, metadata=about("each group draws its own width"))
    lattice: int | None = field(
        default=None, metadata=about("draw from so many widths; those between may fail", at_least=2)
    )
    distill: bool = field(default=True, metadata=about("inplace distillation"))
    temperature: float = field(default=1.0, metadata=about("of the soft labels", above=0))
    truth: float = field(
        default=0.0, metadata=about("share of true labels in distillation", at_least=0, at_most=1)
    )
    average_outputs: bool = field(default=False, metadata=about("output averaging"))

    epochs: int = field(default=10, metadata=about("passes over the training images", at_least=1))
    batch_size: int = field(
        default=128, metadata=about("images a step, all ranks together", at_least=1)
    )
    learning_rate: float = field(default=0.1, metadata=about("at its highest", above=0))
    head_rate: float = field(
        default=1.0,
        metadata=about(
            "share of the learning rate for the last layer; 0.1 for MobileNet v2, few classes",
            above=0,
            at_most=1,
        ),
    )
    warmup_epochs: float = field(
        default=0.0, metadata=about("rise to it over so many epochs", at_least=0)
    )
    momentum: float = field(default=0.9, metadata=about("of SGD, nesterov", at_least=0, below=1))
    weight_decay: float = field(
        default=1e-4,
        metadata=about("on linear weights and convolutions that are not depthwise", at_least=0),
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=about("share of true labels spread over all classes", at_least=0, below=1),
    )
    flip: bool = field(default=True, metadata=about("mirror training images at random"))
    crop_padding: int = field(
        default=4, metadata=about("random crop after padding, px", at_least=0)
    )
    cutout: int = field(default=0, metadata=about("side of a square cut out, px", at_least=0))

    calibration_samples: int | None = field(
        default=None,
        metadata=about("training images for batch-norm statistics; none takes all", at_least=2),
    )
    calibration_method: Literal["exact", "moving"] = field(
        default="exact", metadata=about("how they are averaged")
    )
    calibration_augmented: bool = field(
        default=False, metadata=about("over images augmented as in training, not as they are")
    )
    evaluation_batch_size: int = field(
        default=500, metadata=about("images a step, evaluating", at_least=1)
    )
    precision: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=about("auto is bfloat16 on a GPU, float32 on a CPU")
    )
    kernels: bool = field(
        default=True, metadata=about("on a GPU: kernels that need no preparing for a new width")
    )
    device: str = field(default="auto", metadata=about("auto, cpu, cuda or cuda:N"))
    seed: int = field(default=0, metadata=about("of everything random", at_least=0, below=2**32))
    validate_every: int = field(default=1, metadata=about("epochs between validations", at_least=1))
    log_every: int = field(
        default=20, metadata=about("steps between rows of metrics.csv", at_least=1)
    )
    checkpoint_every: int = field(
        default=200, metadata=about("steps between checkpoints", at_least=1)
    )


def check_choices(settings: ClassificationSettings) -> None:
    """Refuses what would train nothing, or would be passed over without a word."""
    check_ranges(settings)
    check_widths(settings, settings.rule, settings.nonuniform)
    if len(set(settings.switches)) < max(1, len(settings.switches)):
        raise AnywidthError(
            f"switches={settings.switches}: expected widths that differ, such as 0.25,0.5,1.0"
        )
    if settings.method == "s":
        for switch in settings.switches:
            WidthRange(settings.low, settings.high, settings.divisor).fraction(switch)
    if settings.strides is not None and len(settings.strides) != 5:
        raise AnywidthError(f"strides={settings.strides}: expected five, such as 1,1,2,2,2")
    if settings.strides is not None and settings.total_stride is not None:
        raise AnywidthError(
            f"strides={settings.strides} and total_stride={settings.total_stride} say the same: "
            "leave one out, or set total_stride to none"
        )
    if settings.data_dir is not None and settings.data not in LIE_SOMEWHERE:
        raise AnywidthError(
            f"data_dir={settings.data_dir!r} is not read with data={settings.data!r}: leave out "
            f"--data-dir, or say what lies there with --data {' | '.join(LIE_SOMEWHERE)}"
        )


def unread_fields(settings: ClassificationSettings) -> dict[str, str]:
    """Fields that nothing reads → the choice that makes it so."""
    distilling = ("distill", "temperature", "truth")
    drawing = ("rule", "widths_per_step", "nonuniform", "lattice")
    found: dict[str, str] = {}
    if settings.method != "us":
        found |= dict.fromkeys((*drawing, *distilling), f"method={settings.method!r}")
    elif settings.rule in ("random", "min+random"):
        found |= dict.fromkeys(distilling, f"rule={settings.rule!r}, which draws no widest width")
    elif not settings.distill:
        found |= dict.fromkeys(distilling[1:], "distill=False")
    if settings.method != "s":
        found |= dict.fromkeys(("switches", "private_affine"), f"method={settings.method!r}")
    if settings.data not in ARRAY_NAMES:
        found |= dict.fromkeys(("crop_padding", "cutout"), "folders of images")
    if ":" in settings.model:
        found |= dict.fromkeys(("total_stride", "strides"), f"model={settings.model!r}")
    return found
