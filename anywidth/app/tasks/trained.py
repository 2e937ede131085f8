"""A finished run of any task: its network and widths, and how to evaluate, judge and deploy it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from anywidth.app.runs.run import Run
from anywidth.app.showing.report import Section
from anywidth.app.tasks.channel_files import check_within
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.searching.judging import Evaluate
from anywidth.slimming.convert import at_width, plan_of
from anywidth.slimming.norm_statistics import norm_records
from anywidth.training.calibration import calibrated_widths, is_full_width_new
from anywidth.translating.deployment import Deployment
from anywidth.width import ChannelConfig, Width


@dataclass(frozen=True)
class Judging:
    """How a search judges a network: never by the images that its results are measured on.

    Args:
        evaluate: the metrics of the network as it is set; each rank calls it on its own.
        metric: the one to search by.
        judged_on: what the network is judged on, in words.
        is_held_out: whether the network was never trained with it.
        calibration: training batches for batch norm; None for a network without.
    """

    evaluate: Evaluate
    metric: str
    judged_on: str
    is_held_out: bool
    calibration: Iterable[Any] | None = None


@dataclass(frozen=True)
class Example:
    """An input for a server's page.

    Args:
        name: describes the input.
        picture: (height, width, channels) in uint8; the input itself if there is no tensor.
        tensor: the input of a network that does not take pictures, without a batch axis.
    """

    name: str
    picture: np.ndarray
    tensor: np.ndarray | None = None

    def described(self) -> dict[str, Any]:
        """As JSON data: the picture as a PNG file, the tensor as bytes."""
        found: dict[str, Any] = {"name": self.name}
        found["picture"] = _base64(png_bytes(self.picture, optimize=True))
        if self.tensor is not None:
            shape = [1, *self.tensor.shape]
            found["tensor"] = {"shape": shape, "data": _base64(self.tensor.tobytes())}
        return found


def as_fact(examples: Iterable[Example]) -> str:
    """Examples as text for a bundle."""
    return json.dumps([one.described() for one in examples])


def png_bytes(pixels: np.ndarray, **options: Any) -> bytes:
    """(height, width, channels) as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG", **options)
    return file.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True)
class Trained:
    """A finished run with its trained network. Widths are those of the user."""

    run: Run
    settings: TaskSettings
    model: nn.Module
    data: Any = None
    """The data that it is measured with, if that was loaded."""

    metrics: ClassVar[Mapping[str, Metric]]
    """The metrics of `evaluate`, the main one first."""
    drawn: ClassVar[tuple[str, ...]] = ()
    """Metrics with their own plots, besides the main one."""
    curves: ClassVar[Mapping[str, str]]
    """Logged quantities in the training curves, and their names."""
    sections_need_data: ClassVar[bool] = False

    @staticmethod
    def network(run: Run, settings: Any) -> nn.Module:
        """The network of a finished run, before its weights are loaded."""
        raise NotImplementedError

    @staticmethod
    def load_data(run: Run, settings: Any, device: torch.device) -> Any:
        """The data of a run, if it is measured with any."""
        return None

    def with_data(self, **places: Path | None) -> Self:
        """The same run with its data, which may have moved to new folders."""
        settings = self.settings.moved(**places)
        device = next(self.model.parameters()).device
        return replace(self, settings=settings, data=self.load_data(self.run, settings, device))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of the network at the width it is set to."""
        raise NotImplementedError

    @property
    def measured_on(self) -> str:
        """The data of `evaluate`, such as "2,000 test images of CIFAR-10"."""
        return self.settings.trained_on

    def deployment(self) -> Deployment:
        """The network for `anywidth export`, with its inputs and outputs.

        It normalises images itself, so that its input is plain pixels.
        """
        raise NotImplementedError

    def examples(self) -> list[Example]:
        """Example inputs for a server's page; from its data if that was loaded."""
        return []

    def judging(self, seed: int = 0) -> Judging:
        """How `anywidth search` judges the network; `seed` chooses the images."""
        raise AnywidthError(f"a run of {self.settings.task} cannot be searched")

    def calibrate(
        self, widths: Sequence[Width], samples: int | None = None, method: str | None = None
    ) -> int:
        """Compute statistics; returns the number of images, or 0 without batch norm."""
        return 0

    def tune(self, widths: Sequence[float], epochs: int, learning_rate: float) -> int:
        """Tune scales and biases of norms for some widths; returns the number of images."""
        raise AnywidthError(f"{self.run.folder} is a run of {self.settings.task}: no norms to tune")

    def sections(self) -> list[Section]:
        """The sections of the report besides the spectrum."""
        return []

    # ---- widths ----

    @property
    def widths(self) -> list[float]:
        """The default widths of a spectrum."""
        return self.settings.widths

    def own_width(self, width: Width) -> Width:
        """A user's width as a width of the network object; channels are checked."""
        if not isinstance(width, ChannelConfig):
            return self.settings.own_width(self.model, width)
        return check_within(width, plan_of(self.model), "channels")

    def at(self, width: Width) -> AbstractContextManager[ChannelConfig]:
        """Run the network at a width inside a `with` block."""
        return at_width(self.model, self.own_width(width))

    def chosen(self, width: float | None) -> float:
        """The given width, or the widest; raises if the network does not have it."""
        found = max(self.widths) if width is None else width
        plan_of(self.model).resolve(self.own_width(found))
        return found

    # ---- statistics ----

    @property
    def has_statistics(self) -> bool:
        """Whether the network has batch norm, with separate statistics per width."""
        return bool(norm_records(self.model))

    def uncalibrated(self, widths: Iterable[Width]) -> list[Width]:
        """The widths that must be calibrated before they can be evaluated."""
        if not self.has_statistics:
            return []
        plan = plan_of(self.model)
        known = {plan.resolve(width) for width in calibrated_widths(self.model)}
        if is_full_width_new(self.model):
            known.discard(plan.full)
        return [width for width in widths if plan.resolve(self.own_width(width)) not in known]

    def complete_statistics(self, widths: Sequence[Width]) -> None:
        """Calibrate all of the widths if one has no statistics.

        Training leaves moving averages at some widths; next to the exact statistics of the others,
        a spectrum would mix two kinds.
        """
        if self.uncalibrated(widths):
            self.calibrate(widths)
