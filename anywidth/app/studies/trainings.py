"""The trainings of studies on disk: each is trained once, in pieces if need be, then measured.

    OUT/runs/NAME-seed-N/                    a run's folder, see `anywidth.app.runs.run`
    OUT/runs/NAME-seed-N/pieces.json         its steps and seconds, versions and device
    OUT/runs/NAME-seed-N/measurements/       one file per measurement

A training with all its measurements is complete, even if its weights were deleted.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anywidth.app.runs.folder_lock import lock_folder
from anywidth.app.runs.run import Run
from anywidth.app.studies.measuring import image_count, measure
from anywidth.app.studies.pieces import check_same, open_run, train_piece
from anywidth.app.studies.provenance import provenance
from anywidth.app.studies.study_parts import Measurement, Study, Training
from anywidth.app.tasks.classification.task import (
    ClassificationSettings,
    TrainedClassifier,
    load_data,
    open_trained,
    train_run,
)
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError
from anywidth.files import make_folder, read_json, remove, write_json
from anywidth.measuring.spectra import Spectrum

_VERSION = 1
# The metrics that every width of a measurement has.
_METRICS = {"top1_error", "top5_error", "loss"}
# Fields that do not change the result: a run may continue elsewhere.
_CIRCUMSTANCES = {"device", "data_dir", "workers"}


@dataclass(frozen=True)
class Job:
    """One network and seed, to be trained and measured."""

    training: Training
    settings: ClassificationSettings
    folder: Path
    measurements: tuple[Measurement, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def out(self) -> Path:
        return self.folder.parents[1]

    @property
    def unread(self) -> set[str]:
        """Fields that may differ from the settings of the existing run."""
        return _CIRCUMSTANCES | self.settings.unread().keys()

    def missing(self) -> list[Measurement]:
        """The missing measurements; raises if the folder holds another training."""
        if not (self.folder / "config.json").exists():
            return list(self.measurements)
        check_same(Run.open(self.folder), self.settings, self.unread)
        return [m for m in self.measurements if not _file(self.folder, m).exists()]


def jobs_of(
    studies: Sequence[Study],
    seeds: Mapping[str, int],
    recipes: Mapping[str, ClassificationSettings],
    out: Path,
) -> list[Job]:
    """The jobs of some studies, each once; the longest first, so that processes end together.

    Args:
        studies: the studies.
        seeds: study → number of seeds.
        recipes: network → the settings that its trainings share.
        out: the folder of the studies.
    """
    wanted: dict[tuple[int, Training], dict[Measurement, None]] = {}
    for study in studies:
        for seed in range(seeds[study.name]):
            for setting in study.settings:
                for training in setting.trainings:
                    wanted.setdefault((seed, training), {})[setting.measurement] = None
    jobs = [
        Job(
            training,
            training.settings(recipes[training.network.name], seed),
            run_folder(out, training, seed),
            tuple(measurements),
        )
        for (seed, training), measurements in wanted.items()
    ]
    return sorted(jobs, key=lambda job: (job.settings.method == "i", -job.settings.width))


def run_folder(out: Path, training: Training, seed: int) -> Path:
    return out / "runs" / f"{training.name}-seed-{seed}"


def work_on(job: Job) -> bool:
    """Train and measure what is missing; false if the training was interrupted."""
    make_folder(job.folder)
    _lock = lock_folder(job.folder, wait=True)  # a run has one writer
    missing = job.missing()
    if not missing:
        return True
    run = open_run(job.folder, job.settings, job.unread)
    is_done, _ = train_piece(run, job.settings, train_run)
    if not is_done:
        return False
    free_memory()
    _check_weights(run, missing)
    device = local_device(job.settings.device)
    opened = open_trained(job.folder, job.settings.device, with_data=False)
    data = load_data(job.settings, device)
    trained = dataclasses.replace(opened, settings=job.settings, data=data)
    (job.folder / "measurements").mkdir(exist_ok=True)
    for measurement in missing:
        found = measure(trained, measurement, job.training.network)
        write_json(
            _file(job.folder, measurement),
            {
                "version": _VERSION,
                **provenance(device),
                "images": image_count(trained, measurement),
                "test_images": data.validation.samples,
                "spectra": {part: one.to_json() for part, one in found.items()},
            },
        )
    checkpoints = job.folder / "checkpoints"
    if checkpoints.is_dir():
        remove(checkpoints)  # twice the size of the finished network, and no longer needed
    return True


def free_memory() -> None:
    """Free the memory of a training, including graphs on a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_measurement(folder: Path, measurement: Measurement, part: str) -> Spectrum:
    path, cure = _file(folder, measurement), "remove the file to measure again"
    try:
        data = read_json(path)
    except AnywidthError as error:
        raise AnywidthError(f"{error}; {cure}") from error
    spectra = data.get("spectra")
    if data.get("version") != _VERSION or not isinstance(spectra, dict) or part not in spectra:
        raise AnywidthError(f"{path} has no {part!r} of version {_VERSION}; {cure}")
    try:
        found = dataclasses.replace(
            Spectrum.from_json(spectra[part]), described=TrainedClassifier.metrics
        )
    except AnywidthError as error:
        raise AnywidthError(f"{path}: {error}; {cure}") from error
    if not all(point.metrics.keys() >= _METRICS for point in found.points):
        raise AnywidthError(f"{path}: a width lacks one of {sorted(_METRICS)}; {cure}")
    return found


def read_image_count(job: Job, measurement: Measurement) -> int | None:
    """The number of calibration images of a measurement; None if its file does not say."""
    return _read_count(job, measurement, "images")


def read_test_image_count(job: Job) -> int | None:
    """The number of test images; None if the file does not say."""
    return _read_count(job, job.measurements[0], "test_images")


def read_devices(job: Job) -> list[str]:
    """The devices on which a training was measured, as far as its files say."""
    paths = [_file(job.folder, measurement) for measurement in job.measurements]
    found = [read_json(path).get("device") for path in paths if path.exists()]
    return [device for device in found if isinstance(device, str)]


def _read_count(job: Job, measurement: Measurement, name: str) -> int | None:
    path = _file(job.folder, measurement)
    found = read_json(path).get(name) if path.exists() else None
    return found if isinstance(found, int) else None


def read_class_count(job: Job) -> int | None:
    """The number of classes of a finished training; None if its record is missing."""
    run = Run.open(job.folder)
    return len(run.state().get("classes", ())) or None if run.finished else None


def _file(folder: Path, measurement: Measurement) -> Path:
    return folder / "measurements" / f"{measurement.name}.json"


def _check_weights(run: Run, missing: Iterable[Measurement]) -> None:
    if not (run.folder / "model.safetensors").exists():
        raise AnywidthError(
            f"{run.folder} was trained, but its network was deleted, so "
            f"{', '.join(m.name for m in missing)} cannot be measured; remove the folder to train "
            "it again"
        )
