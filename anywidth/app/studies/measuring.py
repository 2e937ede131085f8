"""Evaluate a trained network at the widths, and with the statistics, of a study."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from torch import nn

from anywidth.app.runs.loop import load_weights
from anywidth.app.studies.study_parts import Measurement, Network
from anywidth.app.tasks.classification.task import (
    ClassificationSettings,
    TrainedClassifier,
    calibration_images,
)
from anywidth.measuring.spectra import Spectrum, spectrum
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.planning.groups import Plan
from anywidth.slimming.convert import plan_of
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.training.calibration import calibrate, load_statistics
from anywidth.width import ChannelConfig, Width

# Step of the global widths with one stage narrowed, and the narrowing (the paper's 0.6).
STAGE_STEP = 0.05
NARROWING = 0.6
# Base channels of MobileNet v1's five stages of resolution.
STAGE_CHANNELS = (64, 128, 256, 512, 1024)

NO_STATISTICS: tuple[dict[str, Any], dict[str, str]] = ({}, {"widths": "[]"})


def measure(
    trained: TrainedClassifier, measurement: Measurement, network: Network
) -> dict[str, Spectrum]:
    """The spectra of one measurement, by part; the run on disk is not changed."""
    model, settings = trained.model, trained.settings
    # An earlier measurement may have changed statistics; those of full width are in the weights.
    load_weights(model, trained.run.model_tensors(), trained.run.folder)
    load_statistics(model, *trained.run.load_part("statistics"))
    parts = _widths(model, settings, measurement, network)
    if measurement.statistics == "cut":
        load_statistics(model, *NO_STATISTICS)
    elif measurement.statistics != "trained":
        everything = [width for widths in parts.values() for width in widths.values()]
        assert trained.data is not None
        loader = calibration_images(trained.data, settings, samples_of(settings, measurement))
        calibrate(model, loader, everything, method=measurement.statistics)
    allowed = uncalibrated_allowed(model) if measurement.statistics == "cut" else None
    found = {}
    with allowed or contextlib.nullcontext():
        for part, widths in parts.items():
            one = spectrum(model, trained.evaluate, list(widths.values()), name=settings.name)
            named = zip(one.points, widths, strict=True)
            points = tuple(replace(point, width=width) for point, width in named)
            found[part] = replace(one, points=points)
    return found


def image_count(trained: TrainedClassifier, measurement: Measurement) -> int | None:
    """The number of training images for statistics; None if there are no post-statistics."""
    if measurement.statistics in ("trained", "cut"):
        return None
    assert trained.data is not None
    present = trained.data.calibration.samples
    wanted = samples_of(trained.settings, measurement)
    return present if wanted is None else min(wanted, present)


def stage_groups(plan: Plan) -> list[list[str]]:
    """The groups of each stage of MobileNet v1, by their base channels."""
    return [
        [group.name for group in plan.elastic() if group.channels == channels]
        for channels in STAGE_CHANNELS
    ]


def _widths(
    model: nn.Module,
    settings: ClassificationSettings,
    measurement: Measurement,
    network: Network,
) -> dict[str, dict[float, Width]]:
    """Per part: width in the table → width to run at."""
    if measurement.widths == "trained":
        return {"spectrum": {w: settings.own_width(model, w) for w in settings.widths}}
    if measurement.widths == "table":
        return {"spectrum": {width: width for width in network.widths}}
    uniform: dict[float, Width] = {w: w for w in spectrum_widths(settings.low, settings.high)}
    if measurement.widths == "spectrum":
        return {"spectrum": uniform}
    # No stage may be narrower than in training.
    lowest = round(STAGE_STEP * -(-settings.low // (NARROWING * STAGE_STEP)), 6)
    is_possible = lowest <= settings.high
    globally = spectrum_widths(lowest, settings.high, STAGE_STEP) if is_possible else []
    plan = plan_of(model)
    parts: dict[str, dict[float, Width]] = {"uniform": uniform}
    for number, groups in enumerate(stage_groups(plan), start=1):
        parts[f"stage {number}"] = {w: _narrowed(plan, groups, w) for w in globally}
    return parts


def _narrowed(plan: Plan, groups: list[str], width: float) -> ChannelConfig:
    fractions = dict.fromkeys((group.name for group in plan.elastic()), width)
    return plan.resolve(fractions | dict.fromkeys(groups, width * NARROWING))


def samples_of(settings: ClassificationSettings, measurement: Measurement) -> int | None:
    """The requested number of training images; None for all."""
    if measurement.samples == "recipe":
        return settings.calibration_samples
    return None if measurement.samples == "all" else measurement.samples
