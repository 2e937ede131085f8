"""The smallest study: a tiny network on a few of the bundled images."""

from __future__ import annotations

from pathlib import Path

from anywidth.app.studies.definitions import MOBILENET_V1, STUDIES
from anywidth.app.studies.study_parts import Measurement, Study
from anywidth.app.studies.study_recipes import study_recipe
from anywidth.app.studies.trainings import Job, jobs_of, read_measurement
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.measuring.spectra import Spectrum

STUDY = {study.name: study for study in STUDIES}
TINY = {
    "model": "tiny_networks:slow",
    "divisor": "4",
    "limit": "200",
    "batch_size": "20",
    "calibration_samples": "100",
    "checkpoint_every": "1",
    "log_every": "1",
}
SETTINGS = [text for name, value in TINY.items() for text in ("--set", f"{name}={value}")]


def tiny_jobs(study: Study, out: Path) -> list[Job]:
    recipe = study_recipe("bundled", MOBILENET_V1, None, 1, "cpu", TINY)
    return jobs_of([study], {study.name: 1}, {MOBILENET_V1.name: recipe}, out)


def read_classifier(folder: Path, measurement: Measurement) -> Spectrum:
    """The spectrum of a measured classifier."""
    return read_measurement(folder, measurement, "spectrum", TrainedClassifier.metrics)
