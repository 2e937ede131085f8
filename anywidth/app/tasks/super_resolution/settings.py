"""The settings of a super-resolution run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from anywidth.app.runs.settings import option
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.measuring.width_lists import spectrum_widths


@dataclass(frozen=True)
class SuperResolutionSettings(TaskSettings):
    """The settings of a super-resolution run; network and widths are the paper's."""

    task: ClassVar[str] = "super_resolution"
    version: ClassVar[int] = 3  # earlier versions lack some fields
    places: ClassVar[tuple[str, ...]] = ("data_dir", "eval_dir", "cache_dir")
    of_us_nets: ClassVar[tuple[str, ...]] = (*TaskSettings.of_us_nets, "distill", "truth")

    channels: int = option(64, "channels between blocks", at_least=1, at_most=2**14)
    blocks: int = option(8, "residual blocks", at_least=1, at_most=1000)
    scale: int = option(2, "factor by which pictures are enlarged", at_least=2, at_most=4)
    data_dir: str | None = option(
        None, "folder of pictures, or DIV2K's; none uses the bundled ones"
    )
    eval_dir: str | None = option(
        None, "folder of evaluation pictures; each subfolder (Set5, Set14) is a set"
    )
    cache_dir: str | None = option(None, "folder for decoded pictures that do not fit into memory")
    held_out: float = option(
        0.0,
        "share of the training pictures, the last by name, kept for `anywidth search`",
        at_least=0,
        at_most=0.5,
    )
    bicubic_start: bool = option(True, "start with weights that upscale almost like bicubic")

    method: Literal["us", "i"] = option("us", "universally slimmable (us), or one width (i)")
    low: float = option(0.5, "narrowest width (32 of 64 channels)", above=0, at_most=1)
    divisor: int = option(1, "channels are multiples of this; 1 allows any number", at_least=1)
    distill: Literal["none", "l1", "l2"] = option(
        "l2", "loss of narrower widths against the patches of the widest"
    )
    truth: float = option(
        0.0, "share of the true patches in the loss of narrower widths", at_least=0, at_most=1
    )

    epochs: int = option(20, "number of epochs", at_least=1)
    steps_per_epoch: int = option(1000, "training steps per epoch", at_least=1)
    batch_size: int = option(16, "patches per step, all ranks together", at_least=1)
    patch: int = option(48, "side of a low-resolution patch, px", at_least=1, at_most=2**14)
    learning_rate: float = option(1e-3, "highest learning rate of Adam", above=0)
    warmup_steps: int = option(100, "steps of warm-up", at_least=0)

    validation_pictures: int = option(5, "largest number of validation pictures", at_least=1)
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = option(
        "auto", "precision of training; auto is tf32 on a GPU, float32 on a CPU"
    )
    validate_every: int = option(1, "epochs between validations", at_least=1)
    log_every: int = option(20, "steps between rows of metrics.csv", at_least=1)
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1)

    @property
    def network(self) -> str:
        endings = {"l1": ", l1 distillation", "none": ", no distillation"}
        return "WDSR" + (endings.get(self.distill, "") if self.method == "us" else "")

    @property
    def trained_on(self) -> str:
        return "the bundled pictures" if self.data_dir is None else Path(self.data_dir).name

    def trained_widths(self) -> list[float]:
        """Every 0.05 of the range."""
        return spectrum_widths(self.low, self.high, step=0.05)

    def unread(self) -> dict[str, str]:
        has_no_teacher = self.method == "us" and self.distill == "none"
        without = dict.fromkeys(("truth", "teacher"), self.given("distill"))
        return super().unread() | (without if has_no_teacher else {})
