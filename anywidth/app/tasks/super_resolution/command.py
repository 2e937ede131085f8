"""`anywidth upscale`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.showing.output import say
from anywidth.app.tasks.command_options import Device, RunFolder, Width
from anywidth.errors import AnywidthError


def upscale(
    run: RunFolder,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file of any size.")],
    width: Width = None,
    out: Annotated[
        Path | None, typer.Option(help="The PNG to write; if not given, IMAGE-x2.png beside it.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Make a picture larger with a trained super-resolution network, at a width of your choice.

    Narrower is faster. Transparency is kept, and so are grey pictures and their 16 bits.

    Example:

      anywidth upscale runs/sr photo.jpg --width 0.6 --out photo-large.png
    """
    from anywidth.app.tasks.registry import open_only
    from anywidth.app.tasks.super_resolution import picture_files
    from anywidth.app.tasks.super_resolution.upscaling import super_resolve

    trained = open_only("super_resolution", run, device)
    chosen, scale = trained.chosen(width), trained.model.scale
    target = out or image.with_name(f"{image.stem}-x{scale}.png")
    _check_target(target, image)
    picture = picture_files.read(image)
    with trained.at(chosen):
        color = super_resolve(trained.model, picture.color)
    picture_files.write(target, picture.enlarged(color, scale))
    height, across = color.shape[-2:]
    say(f"Written: {target}, {across}x{height} at width {chosen}")


def _check_target(target: Path, image: Path) -> None:
    if target.suffix.lower() != ".png":
        raise AnywidthError(f"--out {target}: PNG is written; choose a name that ends in .png")
    if not target.parent.is_dir():
        raise AnywidthError(f"--out {target}: there is no folder {target.parent}")
    if target.exists() and image.exists() and target.samefile(image):
        raise AnywidthError(f"--out {target} is the image itself; choose another name")
