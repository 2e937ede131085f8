"""Every choice of a classification run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anywidth.errors import AnywidthError

LIE_SOMEWHERE = ("fashion_mnist", "cifar10", "cifar100", "folder")
"""The data that `data_dir` is for."""


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class ClassificationConfig:
    """Every choice of a classification run; the defaults are the paper's where it has them."""

    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 2  # version 1 lacks some fields

    model: str = field(
        default="mobilenet_v1",
        metadata=_help("a name of the zoo, torchvision:NAME, timm:NAME or package.module:function"),
    )
    total_stride: int | None = field(
        default=None, metadata=_help("of the zoo's networks: 32 for 224 px, 8 for 32 px")
    )
    strides: tuple[int, ...] | None = field(
        default=None,
        metadata=_help("of the zoo's networks, instead: their five strides, such as 1,1,2,2,2"),
    )
    data: str = field(
        default="bundled",
        metadata=_help("bundled, fashion_mnist, cifar10, cifar100, or folder (ImageNet's layout)"),
    )
    data_dir: str | None = field(default=None, metadata=_help("where the data lies"))
    image_size: int | None = field(default=None, metadata=_help("crop of folder images, px"))
    limit: int | None = field(default=None, metadata=_help("use only so many training images"))
    validation: Literal["test", "split"] = field(
        default="test", metadata=_help("the test set, or a tenth split from the training set")
    )
    workers: int = field(default=8, metadata=_help("processes that decode folder images"))
    skip_corrupt: bool = field(default=False, metadata=_help("skip image files that are damaged"))

    method: Literal["us", "s", "i"] = field(
        default="us", metadata=_help("universally slimmable, switches only, or one width alone")
    )
    low: float = field(default=0.25, metadata=_help("narrowest width (the paper's k0)"))
    high: float = field(default=1.0, metadata=_help("widest width"))
    divisor: int = field(default=8, metadata=_help("channels are multiples of this (d)"))
    width: float = field(default=1.0, metadata=_help("the one width of an I-Net"))
    switches: tuple[float, ...] = field(
        default=(0.25, 0.5, 0.75, 1.0), metadata=_help("the widths of an S-Net")
    )
    private_affine: bool = field(
        default=False, metadata=_help("S-Net: a batch-norm scale and bias for each switch")
    )
    widths_per_step: int = field(default=4, metadata=_help("widths trained each step (n)"))
    rule: Literal["sandwich", "random", "min+random", "max+random"] = field(
        default="sandwich", metadata=_help("how they are drawn")
    )
    nonuniform: bool = field(default=False, metadata=_help("each group draws its own width"))
    lattice: int | None = field(default=None, metadata=_help("draw from so many configurations"))
    distill: bool = field(default=True, metadata=_help("inplace distillation"))
    temperature: float = field(default=1.0, metadata=_help("of the soft labels"))
    truth: float = field(default=0.0, metadata=_help("share of true labels in distillation"))
    average_outputs: bool = field(default=False, metadata=_help("output averaging"))

    epochs: int = field(default=10, metadata=_help("passes over the training images"))
    batch_size: int = field(default=128, metadata=_help("images a step, all ranks together"))
    learning_rate: float = field(default=0.1, metadata=_help("at its highest"))
    warmup_epochs: float = field(default=0.0, metadata=_help("rise to it over so many epochs"))
    momentum: float = field(default=0.9, metadata=_help("of SGD, nesterov"))
    weight_decay: float = field(
        default=1e-4, metadata=_help("on linear weights and convolutions that are not depthwise")
    )
    label_smoothing: float = field(
        default=0.0, metadata=_help("share of true labels spread over all classes")
    )
    flip: bool = field(default=True, metadata=_help("mirror training images at random"))
    crop_padding: int = field(default=4, metadata=_help("random crop after padding, px"))
    cutout: int = field(default=0, metadata=_help("side of a square cut out, px"))

    calibration_samples: int | None = field(
        default=None, metadata=_help("training images for batch-norm statistics; none takes all")
    )
    calibration_method: Literal["exact", "moving"] = field(
        default="exact", metadata=_help("how they are averaged")
    )
    calibration_augmented: bool = field(
        default=False, metadata=_help("over images augmented as in training, not as they are")
    )
    evaluation_batch_size: int = field(default=500, metadata=_help("images a step, evaluating"))
    precision: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=_help("auto is bfloat16 on a GPU, and on a CPU where it is faster")
    )
    kernels: bool = field(
        default=True, metadata=_help("on a GPU: kernels that need no preparing for a new width")
    )
    device: str = field(default="auto", metadata=_help("auto, cpu, cuda or cuda:N"))
    seed: int = field(default=0, metadata=_help("of everything random"))
    validate_every: int = field(default=1, metadata=_help("epochs between validations"))
    log_every: int = field(default=20, metadata=_help("steps between rows of metrics.csv"))
    checkpoint_every: int = field(default=200, metadata=_help("steps between checkpoints"))


def check_choices(config: ClassificationConfig) -> None:
    """Refuses what would train nothing, or would be passed over without a word."""
    for name in ("epochs", "batch_size", "evaluation_batch_size"):
        if getattr(config, name) < 1:
            raise AnywidthError(f"{name}={getattr(config, name)}: expected at least 1")
    if config.temperature <= 0:
        raise AnywidthError(
            f"temperature={config.temperature}: expected a number above 0; 1.0 leaves the soft "
            "labels as they are"
        )
    if not 0 <= config.label_smoothing < 1:
        raise AnywidthError(
            f"label_smoothing={config.label_smoothing}: expected a share from 0 to below 1, such "
            "as 0.1"
        )
    if config.strides is not None and config.total_stride is not None:
        raise AnywidthError(
            f"strides={config.strides} and total_stride={config.total_stride} say the same thing: "
            "leave one out (--set total_stride=none)"
        )
    if config.method == "i" and not 0 < config.width <= 1:
        raise AnywidthError(
            f"width={config.width}: an I-Net's width is a number in (0, 1], such as 0.5"
        )
    if config.data_dir is not None and config.data not in LIE_SOMEWHERE:
        raise AnywidthError(
            f"data_dir={config.data_dir!r} is not read with data={config.data!r}: leave out "
            f"--data-dir, or say what lies there with --data {' | '.join(LIE_SOMEWHERE)}"
        )
