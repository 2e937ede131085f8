"""Every choice of a super-resolution run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from anywidth.app.runs.settings import about, check_ranges
from anywidth.app.tasks.width_choices import check_widths


@dataclass(frozen=True)
class SuperResolutionSettings:
    """Every choice of a super-resolution run; the network and the widths are the paper's."""

    task: ClassVar[str] = "super_resolution"
    version: ClassVar[int] = 1

    channels: int = field(
        default=64, metadata=about("channels carried from block to block", at_least=1)
    )
    blocks: int = field(default=8, metadata=about("residual blocks", at_least=1))
    scale: int = field(
        default=2, metadata=about("how much larger pictures become", at_least=2, at_most=4)
    )
    data_dir: str | None = field(
        default=None, metadata=about("folder of pictures, or DIV2K's; none takes the bundled ones")
    )
    eval_dir: str | None = field(
        default=None,
        metadata=about("pictures to evaluate on; each subfolder (Set5, Set14) is a set"),
    )
    cache_dir: str | None = field(
        default=None, metadata=about("where decoded pictures too large for memory are kept")
    )

    bicubic_start: bool = field(
        default=True, metadata=about("initial weights that upscale as bicubic does, nearly")
    )

    method: Literal["us", "i"] = field(
        default="us", metadata=about("universally slimmable, or one width alone")
    )
    low: float = field(
        default=0.5, metadata=about("narrowest width (32 of 64 channels)", above=0, at_most=1)
    )
    high: float = field(default=1.0, metadata=about("widest width", above=0, at_most=1))
    divisor: int = field(
        default=1,
        metadata=about("channels are multiples of this; 1 allows every count", at_least=1),
    )
    width: float = field(
        default=1.0, metadata=about("the one width of an I-Net", above=0, at_most=1)
    )
    widths_per_step: int = field(
        default=4, metadata=about("widths trained each step (n)", at_least=1)
    )
    lattice: int | None = field(
        default=None, metadata=about("draw from so many widths; those between may fail", at_least=2)
    )
    distill: Literal["none", "l1", "l2"] = field(
        default="l2", metadata=about("how narrower widths learn from the widest one's patches")
    )
    truth: float = field(
        default=0.0,
        metadata=about(
            "share of the true patches in what narrower widths learn", at_least=0, at_most=1
        ),
    )

    epochs: int = field(default=20, metadata=about("stretches between validations", at_least=1))
    steps_per_epoch: int = field(default=1000, metadata=about("training steps of each", at_least=1))
    batch_size: int = field(
        default=16, metadata=about("patches a step, all ranks together", at_least=1)
    )
    patch: int = field(default=48, metadata=about("side of a low-resolution patch, px", at_least=1))
    learning_rate: float = field(default=1e-3, metadata=about("of Adam at its highest", above=0))
    warmup_steps: int = field(
        default=100, metadata=about("rise to it over so many steps", at_least=0)
    )

    validation_pictures: int = field(
        default=5, metadata=about("validate on so many at most", at_least=1)
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = field(
        default="auto", metadata=about("of training; auto is tf32 on a GPU, float32 on a CPU")
    )
    device: str = field(default="auto", metadata=about("auto, cpu, cuda or cuda:N"))
    seed: int = field(default=0, metadata=about("of everything random", at_least=0, below=2**32))
    validate_every: int = field(default=1, metadata=about("epochs between validations", at_least=1))
    log_every: int = field(
        default=20, metadata=about("steps between rows of metrics.csv", at_least=1)
    )
    checkpoint_every: int = field(
        default=500, metadata=about("steps between checkpoints", at_least=1)
    )

    @property
    def data(self) -> str:
        """What the training pictures are called in a report."""
        return "the bundled pictures" if self.data_dir is None else Path(self.data_dir).name

    @property
    def name(self) -> str:
        """What the network is called in plots and tables."""
        if self.method == "i":
            return "I-WDSR"
        endings = {"l1": ", l1 distillation", "l2": "", "none": ", no distillation"}
        return "US-WDSR" + endings[self.distill]


def check_choices(settings: SuperResolutionSettings) -> None:
    """Refuses what would train nothing, or would be passed over without a word."""
    check_ranges(settings)
    check_widths(settings)


def unread_fields(settings: SuperResolutionSettings) -> dict[str, str]:
    """Fields that nothing reads → the choice that makes it so."""
    if settings.method == "i":
        names = ("widths_per_step", "lattice", "distill", "truth")
        return dict.fromkeys(names, "method='i'")
    return {"truth": "distill='none'"} if settings.distill == "none" else {}
