"""Evaluate a trained network at the widths, and with the statistics, of a study."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from anywidth.app.runs.loop import load_weights
from anywidth.app.studies.study_parts import Measurement, Network
from anywidth.app.tasks.classification.task import (
    ClassificationSettings,
    TrainedClassifier,
    calibration_images,
)
from anywidth.app.tasks.super_resolution.task import TrainedUpscaler
from anywidth.app.tasks.super_resolution.upscaling import evaluate_bicubic
from anywidth.app.tasks.trained import Trained
from anywidth.measuring.spectra import Spectrum, spectrum
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.planning.groups import Plan
from anywidth.searching.budgets import Budget
from anywidth.searching.channel_search import search
from anywidth.slimming.convert import plan_of
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.training.calibration import calibrate
from anywidth.training.statistics_state import load_statistics
from anywidth.width import ChannelConfig, Width

# Step of the global widths with one stage narrowed, and the narrowing (the paper's 0.6).
STAGE_STEP = 0.05
NARROWING = 0.6
# Base channels of MobileNet v1's five stages of resolution.
STAGE_CHANNELS = (64, 128, 256, 512, 1024)

# Their multiply-adds, about a quarter and a half of the full width's, are budgets of a search.
SEARCHED_WIDTHS = (0.5, 0.7)


def measure(trained: Trained, measurement: Measurement, network: Network) -> dict[str, Spectrum]:
    """The spectra of one measurement, by part; the run on disk is not changed."""
    model, settings = trained.model, trained.settings
    parts = _widths(trained, measurement, network)
    if isinstance(trained, TrainedClassifier):
        everything = [width for widths in parts.values() for width in widths.values()]
        _set_statistics(trained, measurement, everything)
    is_cut = measurement.statistics == "cut"
    found = {}
    with uncalibrated_allowed(model) if is_cut else contextlib.nullcontext():
        for part, widths in parts.items():
            one = spectrum(model, trained.evaluate, list(widths.values()), name=settings.name)
            named = zip(one.points, widths, strict=True)
            points = tuple(replace(point, width=width) for point, width in named)
            found[part] = replace(one, points=points)
    return found


def _set_statistics(
    trained: TrainedClassifier, measurement: Measurement, widths: list[Width]
) -> None:
    model, settings = trained.model, trained.settings
    # An earlier measurement may have changed statistics; those of full width are in the weights.
    load_weights(model, trained.run.model_tensors(), trained.run.folder)
    load_statistics(model, *trained.run.load_part("statistics"))
    if measurement.statistics == "cut":
        load_statistics(model, {}, {"widths": "[]"})
    elif measurement.statistics != "trained":
        assert trained.data is not None
        loader = calibration_images(trained.data, settings, samples_of(settings, measurement))
        calibrate(model, loader, widths, method=measurement.statistics)


def circumstances(trained: Trained, measurement: Measurement) -> dict[str, Any]:
    """What a page says about a measurement, besides its numbers.

    Classifiers: the number of training images for statistics (None without post-statistics) and of
    test images. Super-resolution: the metrics of bicubic upscaling on the same pictures.
    """
    if isinstance(trained, TrainedUpscaler):
        return {"bicubic": evaluate_bicubic(trained.pictures())}
    if not isinstance(trained, TrainedClassifier) or trained.data is None:
        return {}
    images = None
    if measurement.statistics in ("exact", "moving"):
        present = trained.data.calibration.samples
        wanted = samples_of(trained.settings, measurement)
        images = present if wanted is None else min(wanted, present)
    return {"images": images, "test_images": trained.data.validation.samples}


def stage_groups(plan: Plan) -> list[list[str]]:
    """The groups of each stage of MobileNet v1, by their base channels."""
    return [
        [group.name for group in plan.elastic() if group.channels == channels]
        for channels in STAGE_CHANNELS
    ]


def _widths(
    trained: Trained, measurement: Measurement, network: Network
) -> dict[str, dict[float, Width]]:
    """Per part: width in the table → width to run at."""
    settings = trained.settings
    if measurement.widths == "searched":
        return _searched(trained)
    if measurement.widths == "trained":
        return {"spectrum": {width: trained.own_width(width) for width in settings.widths}}
    if measurement.widths == "table":
        return {"spectrum": {width: width for width in network.widths}}
    every = spectrum_widths(settings.low, settings.high, network.step)
    uniform: dict[float, Width] = {width: width for width in every}
    if measurement.widths == "spectrum":
        return {"spectrum": uniform}
    # No stage may be narrower than in training.
    lowest = round(STAGE_STEP * -(-settings.low // (NARROWING * STAGE_STEP)), 6)
    high = settings.high
    globally = spectrum_widths(lowest, high, STAGE_STEP) if lowest <= high else []
    plan = plan_of(trained.model)
    stages: dict[str, dict[float, Width]] = {
        f"stage {number}": {width: _narrowed(plan, groups, width) for width in globally}
        for number, groups in enumerate(stage_groups(plan), start=1)
    }
    return {"uniform": uniform, **stages}


def _searched(trained: Trained) -> dict[str, dict[float, Width]]:
    """Some uniform widths, and what a search finds for the multiply-adds of each."""
    plan, judging = plan_of(trained.model), trained.judging()
    widths = [w for w in SEARCHED_WIDTHS if trained.settings.low < w < trained.settings.high]
    budgets = {width: Budget("macs", plan.macs(plan.resolve(width))) for width in widths}
    result = search(
        trained.model,
        judging.evaluate,
        list(budgets.values()),
        calibration=judging.calibration,
        metric=judging.metric,
        seed=trained.settings.seed,
    )
    best = {found.budget: found.best.channels for found in result.found}
    return {
        "uniform": {width: width for width in widths},
        "searched": {width: best[budgets[width]] for width in widths},
    }


def _narrowed(plan: Plan, groups: list[str], width: float) -> ChannelConfig:
    fractions = dict.fromkeys((group.name for group in plan.elastic()), width)
    return plan.resolve(fractions | dict.fromkeys(groups, width * NARROWING))


def samples_of(settings: ClassificationSettings, measurement: Measurement) -> int | None:
    """The requested number of training images; None for all."""
    if measurement.samples == "recipe":
        return settings.calibration_samples
    return None if measurement.samples == "all" else measurement.samples
