"""`anywidth predict`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anywidth.app.showing.output import note, say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import working

if TYPE_CHECKING:
    from anywidth.app.tasks.classification.trained import TrainedClassifier

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
"""Endings of the files that are taken from a folder."""


def predict(
    run: options.RunFolder,
    image: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")
    ],
    width: options.Width = None,
    budget: options.MostTime = None,
    max_macs: options.MostMacs = None,
    max_parameters: options.MostParameters = None,
    channels: options.Channels = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, for programs.")] = False,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
) -> None:
    """Classify images with a trained network at a width of your choice.

    Give a width, or a budget that chooses the widest width within it. A width
    without batch-norm statistics is calibrated first, which needs the run's
    data. Files that cannot be read are named, and the others are classified.

    Examples:

      anywidth predict runs/demo shirt.png --width 0.4

      anywidth predict runs/demo photos/ --budget 2ms --json
    """
    from anywidth.app.tasks.chosen_width import Wanted, opened_at

    wanted = Wanted(width, budget, max_macs, max_parameters, channels)
    allowed = {"trust": trust, "model": model}
    trained, chosen = opened_at("classification", run, device, wanted, **allowed)
    files = list(_files(image))
    answers = []
    at_work = working(f"classifying {len(files):,} images") if as_json else nullcontext()
    with trained.at(chosen), at_work:
        for path in files:
            answers.append(_classified(trained, path, top))
            if not as_json:
                _print(answers[-1], is_alone=len(files) == 1)
    if as_json:
        shown = chosen if isinstance(chosen, float) else chosen.to_json()
        typer.echo(json.dumps([{**answer, "width": shown} for answer in answers], indent=2))
    if failed := [answer["error"] for answer in answers if "error" in answer]:
        count = f"{len(failed)} of {len(files)} images could not be read, the first: "
        raise AnywidthError(failed[0] if len(files) == 1 else count + failed[0])


def _files(given: Iterable[Path]) -> Iterator[Path]:
    """The files, and those inside folders that look like images, by name."""
    for path in given:
        if not path.is_dir():
            yield path
            continue
        found = (p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
        inside = sorted(p for p in found if not p.is_dir())
        if not inside:
            raise AnywidthError(f"{path}: no image file in this folder")
        yield from inside


def _classified(trained: TrainedClassifier, path: Path, top: int) -> dict[str, Any]:
    """The likely classes of a file, or why it cannot be read."""
    try:
        likely = trained.predict(path, top)
    except AnywidthError as error:
        return {"image": str(path), "error": str(error)}
    classes = [{"class": name, "probability": share} for name, share in likely]
    return {"image": str(path), "classes": classes}


def _print(answer: dict[str, Any], is_alone: bool) -> None:
    if "error" in answer and not is_alone:
        note(f"anywidth: {answer['error']}")
    elif not is_alone:
        say(answer["image"])
    for one in answer.get("classes", ()):
        say(f"{100 * one['probability']:6.2f} %  {one['class']}")


COMMAND = predict
