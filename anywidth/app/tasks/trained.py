"""A finished run of any task: its network, the widths a user knows, and what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from anywidth.app.runs.run import Run
from anywidth.app.showing.report import Section
from anywidth.app.tasks.examples import Example
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.deploying.deployment import Deployment
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.slimming.convert import at_width, plan_of
from anywidth.slimming.norm_statistics import norm_records
from anywidth.training.calibration import calibrated_widths, is_full_width_new
from anywidth.width import ChannelConfig


@dataclass(frozen=True)
class Trained:
    """A finished run: its network as trained. Widths are those a user names."""

    run: Run
    settings: TaskSettings
    model: nn.Module

    metrics: ClassVar[Mapping[str, Metric]]
    """What `evaluate` measures, the main one first."""
    drawn: ClassVar[tuple[str, ...]] = ()
    """Metrics that have plots of their own beside the main one's."""
    curves: ClassVar[Mapping[str, str]]
    """Logged quantities that are drawn, and what they are called."""
    sections_need_data: ClassVar[bool] = False

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics of the network at the width it is set to."""
        raise NotImplementedError

    def deployment(self) -> Deployment:
        """How the network is called in the file that `anywidth export` writes.

        Normalising images is part of that network, so that pixels go in and answers come out.
        """
        raise NotImplementedError

    def examples(self) -> list[Example]:
        """Inputs to try on a server's page; those of its data if that was loaded."""
        return []

    def calibrate(
        self, widths: Sequence[float], samples: int | None = None, method: str | None = None
    ) -> int:
        """Computes statistics, and returns over how many images; 0 if there is no batch norm."""
        return 0

    def sections(self) -> list[Section]:
        """What the report shows beside the spectrum."""
        return []

    # ---- widths ----

    @property
    def widths(self) -> list[float]:
        """The widths that a spectrum covers unless told."""
        return self.settings.widths

    def own_width(self, width: float) -> float:
        """What the network itself calls a width."""
        return self.settings.own_width(self.model, width)

    def at(self, width: float) -> AbstractContextManager[ChannelConfig]:
        """Runs the network at a width inside a `with` block."""
        return at_width(self.model, self.own_width(width))

    def chosen(self, width: float | None) -> float:
        """The width that a user asks for, or the widest; refused if it has no statistics."""
        found = max(self.widths) if width is None else width
        if self.uncalibrated([found]):
            raise AnywidthError(
                f"no statistics for width {found}: calibrate it first with: "
                f"anywidth calibrate {self.run.folder} --widths {found}"
            )
        return found

    # ---- statistics ----

    @property
    def has_statistics(self) -> bool:
        """Whether there is batch norm, whose statistics every width has its own of."""
        return bool(norm_records(self.model))

    def uncalibrated(self, widths: Iterable[float]) -> list[float]:
        """The widths that have to be calibrated before they can be evaluated."""
        if not self.has_statistics:
            return []
        plan = plan_of(self.model)
        known = {plan.resolve(width) for width in calibrated_widths(self.model)}
        if is_full_width_new(self.model):
            known.discard(plan.full)
        return [width for width in widths if plan.resolve(self.own_width(width)) not in known]

    def complete_statistics(self, widths: Sequence[float]) -> None:
        """Calibrates all of the widths if one has no statistics.

        Training leaves moving averages at the widths it tracks: beside the others' exact
        statistics those would make a spectrum of two kinds.
        """
        if self.uncalibrated(widths):
            self.calibrate(widths)
