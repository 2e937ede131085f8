"""Write a finished study: its page, its numbers, its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from anywidth.app.showing.figure_style import write_figures
from anywidth.app.showing.spectrum_tables import format_metric
from anywidth.app.studies.comparing import Finding
from anywidth.app.studies.figures import draw_curves, study_figure
from anywidth.app.studies.measuring import samples_of
from anywidth.app.studies.study_parts import Measurement, Study
from anywidth.app.studies.tables import collect, to_csv, to_markdown
from anywidth.app.studies.trainings import Job, read_class_count, read_fact, read_pieces
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.errors import AnywidthError
from anywidth.files import write_atomically, write_json
from anywidth.measuring.spectra import Spectrum

# What a page says of a recipe, with the names of its fields.
_RECIPE = {
    "classification": "epochs {epochs}, batches of {batch_size}, learning rate {learning_rate}, "
    "share of it for the last layer {head_rate}, warm-up epochs {warmup_epochs}, weight decay "
    "{weight_decay}, label smoothing {label_smoothing}, cutout in px {cutout}",
    "super_resolution": "channels {channels}, blocks {blocks}, epochs {epochs}, steps per epoch "
    "{steps_per_epoch}, batches of {batch_size}, patches of px {patch}, learning rate "
    "{learning_rate}, warm-up steps {warmup_steps}",
    "reinforcement": "agent steps {steps}, games at once {environments}, steps per roll-out "
    "{rollout}, passes over it {epochs}, batches of {batch_size}, learning rate {learning_rate}, "
    "entropy weight {entropy_weight}, final games {evaluation_games}",
}


def write_study(
    study: Study, jobs: Sequence[Job], seeds: int, out: Path, command: str
) -> tuple[Path, list[Finding]]:
    """Write NAME.md, .csv, .json and figures; return the page and the findings.

    All jobs of the study must be trained and measured; `command` is the one that repeats it.
    """
    test_images = read_fact(jobs[0], jobs[0].measurements[0], "test_images")
    results = collect(study, seeds, out, read_class_count(jobs[0]), test_images)
    found = study.find(results)
    facts = facts_of(study, jobs, seeds, command)
    curves = draw_curves(study, jobs, results, out)
    page = out / f"{study.name}.md"
    write_atomically(page, to_markdown(study, results, facts, found, curves).encode())
    write_atomically(out / f"{study.name}.csv", to_csv(results).encode())
    findings = [{"verdict": str(one.verdict), "text": one.text} for one in found]
    write_json(out / f"{study.name}.json", {"study": study.name, **facts, "findings": findings})
    for picture in study.figures():
        write_figures(out / picture.file, partial(study_figure, picture, results))
    return page, found


def facts_of(study: Study, jobs: Sequence[Job], seeds: int, command: str) -> dict[str, str]:
    """How the numbers were made, from the records of the trainings."""
    pieces = [piece for job in jobs for piece in read_pieces(job.folder)]
    minutes = sum(piece["seconds"] for piece in pieces) / 60
    killed = sum(bool(piece.get("killed")) for piece in pieces)
    without = f", without {killed} piece{'s' * (killed > 1)} that ended in a kill" if killed else ""
    names = [field.name for field in dataclasses.fields(jobs[0].settings)]
    recipe = _RECIPE[study.task.name].format_map({name: _of_each(jobs, name) for name in names})
    return {
        "command": f"`{command}`",
        **_data(jobs),
        "recipe": f"{recipe}, the same for all of a network",
        **_random_widths(jobs),
        "seeds": str(seeds),
        **_statistics(study, jobs),
        **_bicubic(jobs),
        "trainings": f"{len(jobs)}, in {minutes:.1f} minutes of one process in all{without}",
        "commit": _distinct(pieces, "commit"),
        "versions": ", ".join(
            f"{name} {_distinct(pieces, name)}" for name in ("anywidth", "torch", "python")
        ),
        "device": _distinct(pieces, "device") + _measured_elsewhere(jobs, pieces),
    }


def _data(jobs: Sequence[Job]) -> dict[str, str]:
    """The data, and for classifiers the forms of the networks."""
    settings = [job.settings for job in jobs]
    classifiers = [one for one in settings if isinstance(one, ClassificationSettings)]
    if not classifiers:
        return {"data": settings[0].trained_on}
    limit = classifiers[0].limit
    return {
        "data": classifiers[0].data + (f", {limit} training images" if limit is not None else ""),
        "networks": "; ".join(dict.fromkeys(f"{one.model}, {_form(one)}" for one in classifiers)),
    }


def _bicubic(jobs: Sequence[Job]) -> dict[str, str]:
    """The metrics of bicubic upscaling; raises if networks were measured on other pictures."""
    found = {job.name: read_fact(job, m, "bicubic") for job in jobs for m in job.measurements}
    known = {name: one for name, one in found.items() if isinstance(one, dict)}
    if not known:
        return {}
    (first, metrics), *others = known.items()
    for name, other in others:
        if other != metrics:
            raise AnywidthError(
                f"{first} and {name} were measured on different pictures; remove the folder "
                f"measurements of one of them, and repeat the command with --set eval_dir=FOLDER"
            )
    spectrum = Spectrum("", (), described=jobs[0].task.trained.metrics)
    shown = (
        f"{name.replace('_', ' ')} {format_metric(value, spectrum.describe(name))}"
        for name, value in metrics.items()
    )
    return {"bicubic upscaling": ", ".join(shown)}


def _measured_elsewhere(jobs: Sequence[Job], pieces: Sequence[dict[str, Any]]) -> str:
    trained = {piece.get("device") for piece in pieces}
    devices = [read_fact(job, one, "device") for job in jobs for one in job.measurements]
    found = dict.fromkeys(d for d in devices if isinstance(d, str) and d not in trained)
    return f"; some measured on {' and '.join(found)}" if found else ""


def _statistics(study: Study, jobs: Sequence[Job]) -> dict[str, str]:
    """The images that batch norm was calibrated with; row by row if they differ."""
    by_training = {job.training: job for job in jobs}
    averages = {
        setting.label: _average(by_training[setting.trainings[0]], setting.measurement)
        for setting in study.settings
        if setting.measurement.statistics in ("exact", "moving")
    }
    if not averages:
        return {}
    text = "; ".join(f"*{label}*: {average}" for label, average in averages.items())
    if len(set(averages.values())) == 1:
        text = next(iter(averages.values()))
    augmented = getattr(jobs[0].settings, "calibration_augmented", False)
    return {"statistics": text + (", augmented as in training" if augmented else "")}


def _average(job: Job, measurement: Measurement) -> str:
    """In words, with the number of images that were available."""
    assert isinstance(job.settings, ClassificationSettings)
    wanted, limit = samples_of(job.settings, measurement), job.settings.limit
    used = read_fact(job, measurement, "images")
    if used is None:  # a measurement of an older version
        used = min((n for n in (wanted, limit) if n is not None), default=None)
    text = f"{measurement.statistics} averages over {used or 'all'} training images"
    if wanted is None or used is None or used == wanted:
        return text
    return f"{text} ({wanted} were asked for)"


def _of_each(jobs: Sequence[Job], name: str) -> str:
    """A field of the recipe: once if it is the same for all, else per network."""
    jobs = [job for job in jobs if name not in dict(job.training.changes)] or jobs
    by_network = {job.training.network.name: getattr(job.settings, name) for job in jobs}
    if len(set(by_network.values())) == 1:
        return str(getattr(jobs[0].settings, name))
    return " and ".join(f"{value} ({network})" for network, value in by_network.items())


def _random_widths(jobs: Sequence[Job]) -> dict[str, str]:
    """The number of configurations that US-Nets drew from; empty without US-Nets."""
    drawn = {
        f"a separate width per layer, of {job.settings.lattice or 'all'} configurations"
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
