"""The parts of a study: networks to train, ways to measure them, and lines of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anywidth.app.studies.comparing import Finding, Results
from anywidth.app.tasks.registry import Task, task_named
from anywidth.app.tasks.task_settings import SettingsOfTask


@dataclass(frozen=True)
class Network:
    """A network of the paper's tables, and their widths."""

    name: str  # in `anywidth.models` and in `paper_tables.csv`
    title: str  # as people write it
    widths: tuple[float, ...]
    task: str = "classification"
    step: float = 0.025  # between the widths of a whole spectrum


MOBILENET_V1 = Network("mobilenet_v1", "MobileNet v1", (0.25, 0.5, 0.75, 1.0))
MOBILENET_V2 = Network("mobilenet_v2", "MobileNet v2", (0.35, 0.5, 0.75, 1.0))


@dataclass(frozen=True)
class Training:
    """One network to train, and its changes to the recipe of the data set.

    Equal changes give equal names, so studies that need the same network train it once.
    """

    network: Network
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        changes = dict(self.changes)
        words = [self.network.name, str(changes.pop("method", "us"))]
        words += [f"{field}-{str(value).lower()}" for field, value in changes.items()]
        return "-".join(words)

    def settings(self, recipe: SettingsOfTask, seed: int) -> SettingsOfTask:
        return replace(recipe, **dict(self.changes), seed=seed)


def training(network: Network, **changes: Any) -> Training:
    """A training with its changes in a fixed order."""
    return Training(network, tuple(sorted(changes.items())))


@dataclass(frozen=True)
class Measurement:
    """How a trained network is evaluated.

    Args:
        name: name of its file.
        statistics: batch-norm statistics: `"trained"`, as tracked in training; `"exact"` or
            `"moving"` averages after training; or `"cut"`, the first of the full width's, which
            the library itself refuses to use.
        widths: the widths it was `"trained"` for, the whole `"spectrum"`, the paper's `"table"`,
            `"stages"` narrowed one by one, or `"searched"`: what a search finds for the
            multiply-adds of some widths.
        samples: training images for the statistics; `"recipe"` uses the recipe's number.
    """

    name: str
    statistics: Literal["trained", "exact", "moving", "cut"] = "exact"
    widths: Literal["trained", "spectrum", "table", "stages", "searched"] = "spectrum"
    samples: int | Literal["recipe", "all"] = "recipe"


@dataclass(frozen=True)
class Setting:
    """A line of a study's table: one network, or for I-Nets one network per width."""

    label: str  # in tables and figures
    network: Network
    trainings: tuple[Training, ...]
    measurement: Measurement
    part: str = "spectrum"  # of the measurement
    kind: str = "us"  # how a figure draws it, see `anywidth.measuring.spectra.KINDS`
    paper: tuple[str, str] | None = None  # table and setting in `paper_tables.csv`, if it has them


@dataclass(frozen=True)
class Picture:
    """A figure: some settings of one network, by their labels."""

    file: str  # without the suffix
    title: str
    network: Network
    labels: tuple[str, ...]
    legend: Mapping[str, str] = field(default_factory=dict)  # longer names for some labels


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or a question that the paper leaves open."""

    name: str  # on the command line
    source: str | None  # the table or figure of the paper; None if it is not in the paper
    compares: str  # in one line
    settings: tuple[Setting, ...]  # the lines of its table
    find: Callable[[Results], list[Finding]]  # which of the paper's findings hold
    widths: tuple[float, ...] = ()  # columns of the table; the network's widths if not given
    pictures: tuple[Picture, ...] = ()  # one per network if not given
    seeds: int = 1  # by default, for data that is trained on a GPU
    minutes: Mapping[str, float] = field(default_factory=dict)  # data and machine → per seed
    curves: str | None = None  # the logged metric of its learning curves, if it draws them

    @property
    def task(self) -> Task:
        return task_named(self.settings[0].network.task)

    @property
    def place(self) -> str:
        """Its place in the paper, in words."""
        return "not in the paper" if self.source is None else f"{self.source} of the paper"

    @property
    def networks(self) -> list[Network]:
        return list(dict.fromkeys(setting.network for setting in self.settings))

    @property
    def trainings(self) -> list[Training]:
        return list(dict.fromkeys(one for setting in self.settings for one in setting.trainings))

    @property
    def varied(self) -> set[str]:
        """Fields of the recipe that some of its trainings change."""
        return {name for one in self.trainings for name, _ in one.changes}

    def figures(self) -> tuple[Picture, ...]:
        if self.pictures:
            return self.pictures
        several = len(self.networks) > 1
        return tuple(
            Picture(
                f"{self.name}-{network.name}" if several else self.name,
                f"{network.title}: {self.name.replace('-', ' ')}",
                network,
                tuple(s.label for s in self.settings if s.network == network),
            )
            for network in self.networks
        )
