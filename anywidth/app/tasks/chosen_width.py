"""The width that a command runs at: the one asked for, or the widest that a budget allows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anywidth.app.own_command import own_command
from anywidth.app.runs.folder_lock import lock_folder
from anywidth.app.runs.loop import load_final
from anywidth.app.showing.output import note
from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.tasks.channel_files import check_within, read_channels
from anywidth.app.tasks.registry import check_task, open_trained
from anywidth.app.tasks.results import earlier_spectrum
from anywidth.app.tasks.trained import Trained
from anywidth.errors import AnywidthError, errors_about
from anywidth.measuring.cost import macs, parameter_count
from anywidth.measuring.deployed_latency import deployed_latencies
from anywidth.measuring.heartbeat import working
from anywidth.searching.budgets import Budget, CostKind, shown_cost
from anywidth.slimming.convert import plan_of
from anywidth.width import ChannelConfig, Width

_OPTIONS: dict[CostKind, str] = {
    "milliseconds": "--budget",
    "macs": "--max-macs",
    "parameters": "--max-parameters",
}
Costs = dict[CostKind, dict[float, float]]


@dataclass(frozen=True)
class Wanted:
    """The values of --width, --budget, --max-macs, --max-parameters and --channels."""

    width: float | None = None
    budget: str | None = None
    max_macs: str | None = None
    max_parameters: str | None = None
    channels: Path | None = None

    def limits(self) -> list[Budget]:
        """What was given besides a width; raises if that cannot be read, or if both were given."""
        texts = dict(zip(_OPTIONS, (self.budget, self.max_macs, self.max_parameters), strict=True))
        found = [_parsed(kind, text) for kind, text in texts.items() if text is not None]
        if found and self.width is not None:
            raise AnywidthError(
                f"--width {self.width} and {_OPTIONS[found[0].kind]}: give only one of them"
            )
        if self.channels is not None and (found or self.width is not None):
            given = _OPTIONS[found[0].kind] if found else f"--width {self.width}"
            raise AnywidthError(f"--channels {self.channels} and {given}: give only one of them")
        return found


def opened_at(
    task: str, folder: Path, device: str, wanted: Wanted, **permissions: Any
) -> tuple[Any, Width]:
    """A finished run of a command's task, and the width that is wanted, with its statistics.

    `permissions` are as for `open_trained`. The run's data is loaded if there are no statistics.
    """
    with working(f"opening {folder}"):
        check_task(folder, task)
        opened = open_trained(folder, device, with_data=False, **permissions)
    width: Width
    if wanted.channels is not None:
        wanted.limits()  # raises if there are any
        width = given_channels(opened, wanted.channels)
    else:
        width = max(fitting_widths(opened, wanted))
    return calibrated(opened, [width]), width


def given_channels(trained: Trained, path: Path) -> ChannelConfig:
    """The channels in a file, if they are those of the run's network."""
    return check_within(read_channels(path), plan_of(trained.model), f"--channels {path}")


def fitting_widths(trained: Trained, wanted: Wanted) -> list[float]:
    """The widths that are within all limits; without limits the one width, or the widest."""
    limits = wanted.limits()
    if not limits:
        return [trained.chosen(wanted.width)]
    costs = _costs(trained, {limit.kind for limit in limits})
    known = next(iter(costs.values()))
    fitting = [
        width
        for width in known
        if all(costs[limit.kind][width] <= limit.amount for limit in limits)
    ]
    if not fitting:
        raise _too_small(limits, costs)
    widest = max(fitting)
    told = [shown_cost(kind, found[widest]) for kind, found in costs.items()]
    note(f"Width {format_width(widest)} is the widest that fits: {', '.join(told)} per example.")
    return fitting


def calibrated(trained: Trained, widths: Sequence[Width]) -> Trained:
    """The run with statistics for all widths; missing ones are computed now if its data is there.

    They are saved in the run, so that they are computed once.
    """
    missing = trained.uncalibrated(widths)
    if not missing:
        return trained
    named = ", ".join(map(format_width, missing))
    folder = trained.run.folder
    _lock = lock_folder(folder, wait=True)  # another command may be calibrating this width
    load_final(trained.model, trained.run)
    if not trained.uncalibrated(missing):
        return trained
    try:
        whole = trained.with_data()
    except AnywidthError as error:
        uniform = [format_width(width) for width in missing if isinstance(width, float)]
        again = own_command("calibrate", folder, "--widths", ",".join(uniform))
        hint = f"; compute them with: {again}"
        raise AnywidthError(
            f"no statistics for width {named}, and they cannot be computed now: {error}"
            f"{hint if uniform else ''}"
        ) from error
    note(f"Width {named} has no batch-norm statistics yet: computing them on training images.")
    try:
        whole.calibrate(whole.uncalibrated(missing))
    except (OSError, AnywidthError) as error:
        if os.access(folder, os.W_OK) or not isinstance(error.__cause__ or error, OSError):
            raise
        note(f"{folder} is read-only, so they are computed again next time.")
    return whole


def _costs(trained: Trained, kinds: set[CostKind]) -> Costs:
    """What each width costs. If time counts, only widths that were timed are known."""
    costs: Costs = {}
    if "milliseconds" in kinds:
        costs["milliseconds"] = _latencies(trained)
        widths = list(costs["milliseconds"])
    elif trained.settings.method == "us":
        widths = plan_of(trained.model).distinct_widths()
    else:
        widths = trained.widths
    own = {width: trained.own_width(width) for width in widths}
    if "macs" in kinds:
        costs["macs"] = {width: macs(trained.model, one) for width, one in own.items()}
    if "parameters" in kinds:
        costs["parameters"] = {
            width: parameter_count(trained.model, one) for width, one in own.items()
        }
    return costs


def _latencies(trained: Trained) -> dict[float, float]:
    """Milliseconds by width: those of the run's spectrum, else measured now."""
    before = earlier_spectrum(trained.run)
    found = {
        point.width: point.latency_ms
        for point in (before.points if before else ())
        if point.width is not None and point.latency_ms is not None
    }
    if found:
        return found
    note("No spectrum with latencies in the run: measuring them now.")
    plan = plan_of(trained.model)
    configs = {width: plan.resolve(trained.own_width(width)) for width in trained.widths}
    timed = deployed_latencies(trained.model, list(dict.fromkeys(configs.values())), True)
    return {width: timed.timings[config].milliseconds for width, config in configs.items()}


def _parsed(kind: CostKind, text: str) -> Budget:
    with errors_about(f"{_OPTIONS[kind]} {text}"):
        return Budget.parse(kind, text)


def _too_small(limits: Sequence[Budget], costs: Costs) -> AnywidthError:
    """Name the limit that even the cheapest width exceeds, or all if each is kept by some width."""
    for limit in limits:
        width, least = min(costs[limit.kind].items(), key=lambda pair: pair[1])
        if least > limit.amount:
            return AnywidthError(
                f"no width fits {_OPTIONS[limit.kind]} {limit}: the narrowest, "
                f"{format_width(width)}, costs {shown_cost(limit.kind, least)}"
            )
    named = " and ".join(f"{_OPTIONS[limit.kind]} {limit}" for limit in limits)
    return AnywidthError(f"no width fits {named} together; allow more of one of them")
