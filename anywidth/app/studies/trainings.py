"""The trainings of studies on disk: each is trained once, in pieces if need be, then measured.

    OUT/runs/NAME-seed-N/                    a run's folder, see `anywidth.app.runs.run`
    OUT/runs/NAME-seed-N/pieces.json         its steps and seconds, versions and device
    OUT/runs/NAME-seed-N/measurements/       one file per measurement

A training with all its measurements is complete, even if its weights were deleted.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anywidth.app.runs.folder_lock import lock_folder
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import to_json
from anywidth.app.studies.measuring import circumstances, measure
from anywidth.app.studies.provenance import provenance
from anywidth.app.studies.study_parts import Measurement, Study, Training
from anywidth.app.tasks.registry import Task, task_named
from anywidth.app.tasks.results import CIRCUMSTANCES
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.distributed import local_device
from anywidth.errors import AnywidthError, errors_about
from anywidth.files import make_folder, read_json, remove, write_json
from anywidth.measuring.spectra import Metric, Spectrum

_VERSION = 1
_PIECES = "pieces.json"

Piece = dict[str, Any]
"""Steps, seconds (including loading, capturing and validating), provenance.

A killed piece has 0 steps and seconds, and is marked `killed`.
"""


@dataclass(frozen=True)
class Job:
    """One network and seed, to be trained and measured."""

    training: Training
    settings: TaskSettings
    folder: Path
    measurements: tuple[Measurement, ...]

    @property
    def task(self) -> Task:
        return task_named(self.settings.task)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def out(self) -> Path:
        return self.folder.parents[1]

    def missing(self) -> list[Measurement]:
        """The missing measurements; raises if the folder holds another training."""
        if not (self.folder / "config.json").exists():
            return list(self.measurements)
        wanted = to_json(self.settings)
        begun = to_json(Run.open(self.folder).read_settings(type(self.settings)))
        free = CIRCUMSTANCES | {*self.settings.places} | self.settings.unread().keys()
        other = sorted({name for name in wanted if begun[name] != wanted[name]} - free)
        if other:
            named = ", ".join(f"{name} {begun[name]!r}, not {wanted[name]!r}" for name in other)
            raise AnywidthError(
                f"{self.folder} was started with {named}: use the same options, or choose another "
                "folder"
            )
        return [m for m in self.measurements if not _file(self.folder, m).exists()]


def jobs_of(
    studies: Sequence[Study],
    seeds: Mapping[str, int],
    recipes: Mapping[str, TaskSettings],
    out: Path,
) -> list[Job]:
    """The jobs of some studies, each once; the longest first, so that processes end together.

    `seeds` has the number of seeds of each study, `recipes` the settings of each network.
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
    is_begun = (job.folder / "config.json").exists()
    run = Run.open(job.folder, writing=True) if is_begun else Run.create(job.folder, job.settings)
    if not train_piece(run, job.settings, job.task.train):
        return False
    free_memory()
    if not (run.folder / "model.safetensors").exists():
        raise AnywidthError(
            f"{run.folder} was trained, but its network was deleted, so "
            f"{', '.join(m.name for m in missing)} cannot be measured; remove the folder to train "
            "it again"
        )
    device = local_device(job.settings.device)
    trained = job.task.open(job.folder, job.settings.device, True, job.settings)
    (job.folder / "measurements").mkdir(exist_ok=True)
    for measurement in missing:
        found = measure(trained, measurement, job.training.network)
        write_json(
            _file(job.folder, measurement),
            {
                "version": _VERSION,
                **provenance(device),
                **circumstances(trained, measurement),
                "spectra": {part: one.to_json() for part, one in found.items()},
            },
        )
    checkpoints = job.folder / "checkpoints"
    if checkpoints.is_dir():
        remove(checkpoints)  # twice the size of the finished network, and no longer needed
    return True


def train_piece(run: Run, settings: TaskSettings, train_run: Callable[[Run, Any], bool]) -> bool:
    """Train until the end or a signal, and record the piece; returns whether the run is done.

    `train_run` of a task saves a checkpoint and returns false when it is stopped.
    """
    if run.finished:
        return True
    begun = run.load_checkpoint()
    before, made_by = read_pieces(run.folder), provenance(local_device(settings.device))
    killed = {"steps": 0, "seconds": 0.0, "killed": True, **made_by}
    write_json(run.folder / _PIECES, {"pieces": [*before, killed]})  # stays if this is killed
    started = time.monotonic()
    is_done = train_run(run, settings)
    seconds = time.monotonic() - started
    ended = run.load_checkpoint()
    steps = (ended.step if ended else 0) - (begun.step if begun else 0)
    piece = {"steps": steps, "seconds": round(seconds, 1), **made_by}
    write_json(run.folder / _PIECES, {"pieces": [*before, piece]})
    return is_done


def read_pieces(folder: Path) -> list[Piece]:
    """The pieces of a run: steps, seconds, versions and device."""
    path = folder / _PIECES
    if not path.exists():
        return []
    cure = f"remove the file, or {folder} to train again"
    try:
        pieces = read_json(path).get("pieces")
    except AnywidthError as error:
        raise AnywidthError(f"{error}; {cure}") from error
    if not isinstance(pieces, list) or not all(map(_is_piece, pieces)):
        raise AnywidthError(f"{path}: damaged, it has no steps and seconds; {cure}")
    return pieces


def _is_piece(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(name), int | float) for name in ("steps", "seconds")
    )


def free_memory() -> None:
    """Free the memory of a training, including graphs on a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_measurement(
    folder: Path, measurement: Measurement, part: str, metrics: Mapping[str, Metric]
) -> Spectrum:
    """One spectrum of a measurement; every width must have these metrics."""
    path, cure = _file(folder, measurement), "remove the file to measure again"
    try:
        data = read_json(path)
    except AnywidthError as error:
        raise AnywidthError(f"{error}; {cure}") from error
    spectra = data.get("spectra")
    if data.get("version") != _VERSION or not isinstance(spectra, dict) or part not in spectra:
        raise AnywidthError(f"{path} has no {part!r} of version {_VERSION}; {cure}")
    with errors_about(path, cure):
        found = dataclasses.replace(Spectrum.from_json(spectra[part]), described=metrics)
    if not all(point.metrics.keys() >= metrics.keys() for point in found.points):
        raise AnywidthError(f"{path}: a width lacks one of {sorted(metrics)}; {cure}")
    return found


def read_fact(job: Job, measurement: Measurement, name: str) -> Any:
    """What a measurement's file says about `name`, see `circumstances`; None if nothing."""
    path = _file(job.folder, measurement)
    return read_json(path).get(name) if path.exists() else None


def read_class_count(job: Job) -> int | None:
    """The number of classes of a finished training; None if its record is missing."""
    run = Run.open(job.folder)
    return len(run.state().get("classes", ())) or None if run.finished else None


def _file(folder: Path, measurement: Measurement) -> Path:
    return folder / "measurements" / f"{measurement.name}.json"
