"""The settings that all tasks share: widths, seeds and folders."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import nn

from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import Settings, option
from anywidth.app.tasks.channel_files import channels_to_text, read_channels
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import plan_of
from anywidth.training.sampling import Sampling
from anywidth.width import WidthRange

WEIGHTS = (
    "weights of the widths of a step: each 1 (paper), or all narrower ones together as much as the "
    "widest (balanced)"
)


@dataclass(frozen=True)
class TaskSettings(Settings):
    """The settings of every task start with these; a task may change a default.

    Widths are those of the user: fractions of the network as designed. Only `own_width` knows that
    a network trained for width 0.25 was built with a quarter of the channels and uses all of them.
    """

    places: ClassVar[tuple[str, ...]] = ()
    """Fields that are folders."""
    of_us_nets: ClassVar[tuple[str, ...]] = (
        *("widths_per_step", "density", "nonuniform", "lattice", "teacher"),
    )
    """Fields that other methods do not read."""

    method: str = option("us", "universally slimmable (us), or one width (i)")
    low: float = option(0.25, "narrowest width (the paper's k0)", above=0, at_most=1)
    high: float = option(1.0, "widest width", above=0, at_most=1)
    divisor: int = option(8, "channels are multiples of this (d)", at_least=1)
    width: float = option(1.0, "the one width of an I-Net", above=0, at_most=1)
    widths_per_step: int = option(4, "widths trained each step (n)", at_least=1, at_most=1000)
    density: Literal["uniform", "log-uniform"] = option(
        "uniform",
        "how random widths are spread over the range: uniform (the paper), or log-uniform, which "
        "draws narrow ones more often",
    )
    nonuniform: bool = option(False, "each group draws its own width")
    lattice: int | None = option(
        None,
        "draw from this many widths (others may fail), or nonuniform configurations",
        at_least=2,
    )
    weights: Literal["paper", "balanced"] = option("paper", WEIGHTS)
    ema_decay: float | None = option(
        None,
        "keep a moving average of the weights with this decay, as 0.997",
        above=0,
        below=1,
    )
    teacher: Literal["full", "ema"] = option(
        "full", "narrower widths learn from the full width, or that of the averaged weights (ema)"
    )
    own_channels: str | None = option(
        None, "train one network with these channels (--channels FILE, of `anywidth search`)"
    )
    from_run: str | None = option(None, "start with the weights of this finished run")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "seed of all random numbers", at_least=0, below=2**32)

    # ---- defined by each task ----

    @property
    def network(self) -> str:
        """The name of the network."""
        raise NotImplementedError

    @property
    def trained_on(self) -> str:
        """The name of the data in a report."""
        raise NotImplementedError

    def trained_widths(self) -> list[float]:
        """The default widths of a spectrum, for a network with several."""
        raise NotImplementedError

    # ---- training ----

    def step_options(self) -> dict[str, Any]:
        """How the widths of a step are weighed and taught: options of `SandwichStep`."""
        unread = self.unread()
        return {
            "weights": "paper" if "weights" in unread else self.weights,
            "teacher": "full" if "teacher" in unread else self.teacher,
            "ema_decay": self.ema_decay,
        }

    # ---- widths ----

    @property
    def name(self) -> str:
        """The name of the network in plots and tables."""
        searched = "" if self.own_channels is None else ", own channels"
        return f"{self.method.upper()}-{self.network}{searched}"

    @property
    def widths(self) -> list[float]:
        """The default widths of a spectrum."""
        return [self.width] if self.method == "i" else self.trained_widths()

    @property
    def width_range(self) -> WidthRange:
        return WidthRange(self.low, self.high, self.divisor)

    def sampling(self) -> Sampling:
        """The widths of each training step."""
        if self.method == "i":
            return Sampling("fixed", widths=(1.0,), seed=self.seed)
        return Sampling(
            count=self.widths_per_step,
            nonuniform=self.nonuniform,
            lattice=self.lattice,
            seed=self.seed,
            density=self.density,
        )

    def own_width(self, model: nn.Module, width: float) -> float:
        """A user's width as a width of the network object.

        An I-Net was built for its width and runs whole, at its own width 1.0. An I-Net of full
        width can be sliced to other widths, as a control.
        """
        if self.method != "i":
            return width
        if math.isclose(width, self.width):
            return 1.0
        if not self.can_narrow(model):
            raise AnywidthError(
                f"width {width}: the network was trained only for width {self.width}; leave the "
                "width out, or train a US-Net"
            )
        return width

    def can_narrow(self, model: nn.Module) -> bool:
        """Whether a network has more than the one width it was built for."""
        widths = plan_of(model).widths
        return self.method != "i" or widths.low < widths.high

    # ---- checks ----

    def check(self) -> None:
        """Refuse settings that would train nothing or be ignored."""
        super().check()
        _ = self.width_range  # raises if it is invalid
        self.sampling()
        if self.step_options()["teacher"] == "ema" and self.ema_decay is None:
            raise AnywidthError("--teacher ema needs an average of the weights: --ema-decay 0.997")
        if self.own_channels is not None and (self.method != "i" or self.width != 1):
            raise AnywidthError(
                f"--channels with {self.given('method')} and {self.given('width')}: one network "
                "with these channels is trained; leave out --method and --width"
            )
        if self.method != "i" and self.width != 1:
            raise AnywidthError(
                f"{self.given('width')} has no effect with {self.given('method')}: leave out "
                "--width, or train a network for this width with --method i"
            )

    def unread(self) -> dict[str, str]:
        """Fields without effect → the setting that causes it."""
        if self.method == "us":
            return {}
        alone = ("weights",) if self.method == "i" else ()
        return dict.fromkeys((*self.of_us_nets, *alone), self.given("method"))

    # ---- what a run may be told to execute ----

    def named_code(self) -> str | None:
        """The field that names code to import, such as `model`; None if none does."""
        return None

    @property
    def allowance(self) -> list[str]:
        """The option that lets a command open a run of these settings, if it needs one."""
        return [] if self.named_code() is None else ["--trust"]

    # ---- places ----

    def anchored(self) -> Self:
        """The same settings with absolute paths, so that a run works from any folder.

        Channels from a file become part of the settings, which then train one network.
        """
        found = {name: getattr(self, name) for name in (*self.places, "from_run")}
        placed = self._placed({name: Path(place) for name, place in found.items() if place})
        if self.own_channels is None or self.own_channels.startswith("{"):
            return placed
        text = channels_to_text(read_channels(Path(self.own_channels)))
        method = "i" if self.method == "us" else self.method
        return dataclasses.replace(placed, own_channels=text, method=method)

    def moved(self, **places: Path | None) -> Self:
        """The settings with new folders for data that has moved."""
        given = {name: place for name, place in places.items() if place is not None}
        for name, place in given.items():
            if name not in self.places:
                raise AnywidthError(
                    f"--{name.replace('_', '-')} {place}: a run of {self.task} does not use this "
                    "option; leave it out"
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


SettingsOfTask = TypeVar("SettingsOfTask", bound=TaskSettings)


def read_settings(
    run: Run, kind: type[SettingsOfTask], *, trust: bool = False, model: str | None = None
) -> SettingsOfTask:
    """The settings in a run's folder, which may come from anyone.

    They may only name code to import if `trust` is true, or if the user names the network again in
    `model`.
    """
    found = run.read_settings(kind)
    if model is not None:
        if not hasattr(found, "model"):
            raise AnywidthError(f"--model {model}: a run of {found.task} has its own network")
        return dataclasses.replace(found, model=model)  # type: ignore[call-arg]
    if not trust:
        refuse_code(found, run.folder)
    return found


def refuse_code(settings: TaskSettings, source: Path) -> None:
    """Refuse settings from a file that name code to import."""
    field = settings.named_code()
    if field is not None:
        value = getattr(settings, field)
        again = f", or name it again: --model {shlex.quote(value)}" if field == "model" else ""
        raise AnywidthError(
            f"{source} names the {field} {value!r}, which is code to import; if you know whose "
            f"it is, allow it with --trust{again}"
        )


def arithmetic_of(precision: str, device: torch.device) -> str:
    """The arithmetic of `auto`: tf32 on a GPU, float32 on a CPU."""
    if precision != "auto":
        return precision
    return "tf32" if device.type == "cuda" else "float32"
