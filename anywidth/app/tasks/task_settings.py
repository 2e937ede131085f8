"""What the settings of all tasks have in common: widths, chance and places."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from anywidth.app.runs.settings import Settings, option
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import plan_of
from anywidth.training.sampling import Sampling
from anywidth.width import WidthRange


@dataclass(frozen=True)
class TaskSettings(Settings):
    """Every task's settings begin with these; a task may give one another default.

    Widths are those a user names, fractions of the network as it was designed. `own_width` alone
    knows that a network trained alone at width 0.25 was built with a quarter of the channels, and
    runs all of them.
    """

    places: ClassVar[tuple[str, ...]] = ()
    """Fields that are folders."""
    of_us_nets: ClassVar[tuple[str, ...]] = ("widths_per_step", "lattice")
    """Fields that other methods do not read."""

    method: str = option("us", "universally slimmable, or one width alone")
    low: float = option(0.25, "narrowest width (the paper's k0)", above=0, at_most=1)
    high: float = option(1.0, "widest width", above=0, at_most=1)
    divisor: int = option(8, "channels are multiples of this (d)", at_least=1)
    width: float = option(1.0, "the one width of an I-Net", above=0, at_most=1)
    widths_per_step: int = option(4, "widths trained each step (n)", at_least=1)
    lattice: int | None = option(
        None, "draw from so many widths; those between may fail", at_least=2
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of everything random", at_least=0, below=2**32)

    # ---- what a task says ----

    @property
    def network(self) -> str:
        """What the network is called."""
        raise NotImplementedError

    @property
    def trained_on(self) -> str:
        """What the data is called in a report."""
        raise NotImplementedError

    def trained_widths(self) -> list[float]:
        """The widths that a spectrum covers unless told, of a network with several."""
        raise NotImplementedError

    # ---- widths ----

    @property
    def name(self) -> str:
        """What the network is called in plots and tables."""
        return f"{self.method.upper()}-{self.network}"

    @property
    def widths(self) -> list[float]:
        """The widths that a spectrum covers unless told."""
        return [self.width] if self.method == "i" else self.trained_widths()

    @property
    def width_range(self) -> WidthRange:
        return WidthRange(self.low, self.high, self.divisor)

    def sampling(self) -> Sampling:
        """The widths of each training step."""
        if self.method == "i":
            return Sampling("fixed", widths=(1.0,), seed=self.seed)
        return Sampling(count=self.widths_per_step, lattice=self.lattice, seed=self.seed)

    def own_width(self, model: nn.Module, width: float) -> float:
        """What the network of these settings itself calls a width.

        A network trained alone was built for its width, and is run whole: 1.0 to the network. One
        of full width can be sliced to others, as a control.
        """
        if self.method != "i":
            return width
        if math.isclose(width, self.width):
            return 1.0
        if not self.can_narrow(model):
            raise AnywidthError(
                f"width {width}: the network was trained at width {self.width} alone; leave the "
                "width out, or train a US-Net"
            )
        return width

    def can_narrow(self, model: nn.Module) -> bool:
        """Whether a network has more than the one width it was built for."""
        widths = plan_of(model).widths
        return self.method != "i" or widths.low < widths.high

    # ---- checks ----

    def check(self) -> None:
        """Refuses what would train nothing, or would be passed over without a word."""
        super().check()
        _ = self.width_range  # it checks itself
        self.sampling()
        if self.method != "i" and self.width != 1:
            raise AnywidthError(
                f"width={self.width} is not read with method={self.method!r}: leave out --width, "
                "or train a network of that one width with --method i"
            )

    def unread(self) -> dict[str, str]:
        """Fields that nothing reads → the choice that makes it so."""
        if self.method == "us":
            return {}
        return dict.fromkeys(self.of_us_nets, f"method={self.method!r}")

    # ---- places ----

    def anchored(self) -> Self:
        """The same folders as absolute paths, so that a run is not tied to the working folder."""
        found = {name: getattr(self, name) for name in self.places}
        return self._placed({name: Path(place) for name, place in found.items() if place})

    def moved(self, **places: Path | None) -> Self:
        """A run's settings with its data where it lies now, as far as that is said."""
        given = {name: place for name, place in places.items() if place is not None}
        for name, place in given.items():
            if name not in self.places:
                raise AnywidthError(
                    f"--{name.replace('_', '-')} {place}: a run of {self.task} reads no such "
                    "folder; leave the option out"
                )
        found = self._placed(given)
        if given:
            found.check()
        return found

    def _placed(self, places: dict[str, Path]) -> Self:
        absolute: dict[str, Any] = {
            name: str(place.expanduser().absolute()) for name, place in places.items()
        }
        return dataclasses.replace(self, **absolute)


def arithmetic_of(precision: str, device: torch.device) -> str:
    """The arithmetic of `auto`: tf32 on a GPU, float32 on a CPU."""
    if precision != "auto":
        return precision
    return "tf32" if device.type == "cuda" else "float32"
