"""Write a finished study: its page, its numbers, its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anywidth.app.studies.comparing import Finding
from anywidth.app.studies.figures import draw
from anywidth.app.studies.measuring import samples_of
from anywidth.app.studies.pieces import read_pieces
from anywidth.app.studies.study_parts import Measurement, Study
from anywidth.app.studies.tables import collect, to_csv, to_markdown
from anywidth.app.studies.trainings import (
    Job,
    read_class_count,
    read_devices,
    read_image_count,
    read_test_image_count,
)
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.files import write_atomically, write_json

# The fields of a recipe that a page shows, and their names there.
_RECIPE = {
    "epochs": "epochs",
    "batch_size": "batches of",
    "learning_rate": "learning rate",
    "head_rate": "share of it for the last layer",
    "warmup_epochs": "warm-up epochs",
    "weight_decay": "weight decay",
    "label_smoothing": "label smoothing",
    "cutout": "cutout in px",
}


def write_study(
    study: Study, jobs: Sequence[Job], seeds: int, out: Path, command: str
) -> tuple[Path, list[Finding]]:
    """Write NAME.md, .csv, .json and figures; return the page and the findings.

    Args:
        study: a study whose trainings are done and measured.
        jobs: its trainings.
        seeds: number of seeds per training.
        out: the folder of the studies.
        command: the command that repeats it.
    """
    results = collect(study, seeds, out, read_class_count(jobs[0]), read_test_image_count(jobs[0]))
    found = study.find(results)
    facts = facts_of(study, jobs, seeds, command)
    page = out / f"{study.name}.md"
    write_atomically(page, to_markdown(study, results, facts, found).encode())
    write_atomically(out / f"{study.name}.csv", to_csv(results).encode())
    findings = [{"verdict": str(one.verdict), "text": one.text} for one in found]
    write_json(out / f"{study.name}.json", {"study": study.name, **facts, "findings": findings})
    for picture in study.figures():
        draw(picture, results, out)
    return page, found


def facts_of(study: Study, jobs: Sequence[Job], seeds: int, command: str) -> dict[str, str]:
    """How the numbers were made, from the records of the trainings."""
    settings = jobs[0].settings
    pieces = [piece for job in jobs for piece in read_pieces(job.folder)]
    minutes = sum(piece["seconds"] for piece in pieces) / 60
    networks = dict.fromkeys(f"{job.settings.model}, {_form(job.settings)}" for job in jobs)
    return {
        "command": f"`{command}`",
        "data": settings.data
        + (f", {settings.limit} training images" if settings.limit is not None else ""),
        "networks": "; ".join(networks),
        "recipe": ", ".join(f"{words} {_of_each(jobs, name)}" for name, words in _RECIPE.items())
        + ", the same for all of a network",
        **_random_widths(jobs),
        "seeds": str(seeds),
        "statistics": _statistics(study, jobs)
        + (", augmented as in training" if settings.calibration_augmented else ""),
        "trainings": f"{len(jobs)}, in {minutes:.1f} minutes of one process in all"
        + _killed(pieces),
        "commit": _distinct(pieces, "commit"),
        "versions": ", ".join(
            f"{name} {_distinct(pieces, name)}" for name in ("anywidth", "torch", "python")
        ),
        "device": _distinct(pieces, "device") + _measured_elsewhere(jobs, pieces),
    }


def _killed(pieces: Sequence[dict[str, Any]]) -> str:
    count = sum(bool(piece.get("killed")) for piece in pieces)
    if not count:
        return ""
    return f", without {count} piece{'s' * (count > 1)} that ended in a kill"


def _measured_elsewhere(jobs: Sequence[Job], pieces: Sequence[dict[str, Any]]) -> str:
    trained = {piece.get("device") for piece in pieces}
    found = dict.fromkeys(d for job in jobs for d in read_devices(job) if d not in trained)
    return f"; some measured on {' and '.join(found)}" if found else ""


def _statistics(study: Study, jobs: Sequence[Job]) -> str:
    """The images that batch norm was calibrated with; row by row if they differ."""
    by_training = {job.training: job for job in jobs}
    averages = {}
    for setting in study.settings:
        if setting.measurement.statistics in ("exact", "moving"):
            job = by_training[setting.trainings[0]]
            averages[setting.label] = _average(job, setting.measurement)
    if len(set(averages.values())) == 1:
        return next(iter(averages.values()))
    return "; ".join(f"*{label}*: {average}" for label, average in averages.items())


def _average(job: Job, measurement: Measurement) -> str:
    """In words, with the number of images that were available."""
    wanted, limit = samples_of(job.settings, measurement), job.settings.limit
    used = read_image_count(job, measurement)
    if used is None:  # a measurement of an older version
        used = min((n for n in (wanted, limit) if n is not None), default=None)
    text = f"{measurement.statistics} averages over {used or 'all'} training images"
    if wanted is None or used is None or used == wanted:
        return text
    return f"{text} ({wanted} were asked for)"


def _of_each(jobs: Sequence[Job], name: str) -> str:
    """A field of the recipe: once if it is the same for all, else per network."""
    by_network = {job.settings.model: getattr(job.settings, name) for job in jobs}
    if len(set(by_network.values())) == 1:
        return str(getattr(jobs[0].settings, name))
    return " and ".join(f"{value} ({network})" for network, value in by_network.items())


def _random_widths(jobs: Sequence[Job]) -> dict[str, str]:
    """The number of configurations that US-Nets drew from; empty without US-Nets."""
    drawn = {
        "a separate width per layer"
        if job.settings.nonuniform
        else f"drawn from {job.settings.lattice or 'all'} uniform configurations"
        for job in jobs
        if job.settings.method == "us"
    }
    return {"random widths": " or ".join(sorted(drawn))} if drawn else {}


def _form(settings: ClassificationSettings) -> str:
    if settings.strides is not None:
        return f"strides {', '.join(map(str, settings.strides))}"
    return f"total stride {settings.total_stride or 32}"


def _distinct(pieces: Sequence[dict[str, Any]], name: str) -> str:
    values = dict.fromkeys(str(piece.get(name, "unknown")) for piece in pieces)
    return " and ".join(values) or "unknown"
