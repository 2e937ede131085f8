"""`anywidth upscale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.showing.output import say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError
from anywidth.measuring.heartbeat import working


def upscale(
    run: options.RunFolder,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file of any size.")],
    width: options.Width = None,
    budget: options.MostTime = None,
    max_macs: options.MostMacs = None,
    max_parameters: options.MostParameters = None,
    channels: options.Channels = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The PNG to write; if not given, IMAGE-x2.png in the same folder."),
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Enlarge a picture with a trained super-resolution network at a width of your choice.

    Narrow widths are faster, wide ones sharper. Large pictures are processed in
    tiles. Transparency, grey pictures and 16 bits are kept.

    Examples:

      anywidth upscale runs/sr photo.jpg --width 0.6 --out photo-large.png

      anywidth upscale runs/sr photo.jpg --budget 50ms
    """
    from anywidth.app.showing.spectrum_tables import format_width
    from anywidth.app.tasks.chosen_width import Wanted, opened_at
    from anywidth.app.tasks.super_resolution import picture_files
    from anywidth.app.tasks.super_resolution.upscaling import super_resolve

    wanted = Wanted(width, budget, max_macs, max_parameters, channels)
    trained, chosen = opened_at("super_resolution", run, device, wanted)
    scale = trained.model.scale
    target = out or image.with_name(f"{image.stem}-x{scale}.png")
    _check_target(target, image)
    with working(f"reading {image}"):
        picture = picture_files.read(image)
    with trained.at(chosen):
        color = super_resolve(trained.model, picture.color, shows_progress=True)
    with working(f"writing {target}"):
        picture_files.write(target, picture.enlarged(color, scale))
    height, across = color.shape[-2:]
    say(f"Written: {target}, {across}x{height} at width {format_width(chosen)}")


def _check_target(target: Path, image: Path) -> None:
    if target.suffix.lower() != ".png":
        raise AnywidthError(f"--out {target}: expected a name that ends in .png")
    if not target.parent.is_dir():
        raise AnywidthError(f"--out {target}: there is no folder {target.parent}")
    if target.exists() and image.exists() and target.samefile(image):
        raise AnywidthError(f"--out {target} is the image itself; choose another name")


COMMAND = upscale
