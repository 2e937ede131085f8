"""The pictures that a super-resolution run trains with, is judged by and is evaluated on."""

from __future__ import annotations

import math
from pathlib import Path

from anywidth.app.tasks.super_resolution.image_quality import WINDOW
from anywidth.app.tasks.super_resolution.pictures import (
    BUNDLED,
    PicturePairs,
    find_images,
    load_pairs,
)
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.errors import AnywidthError


def split_pictures(settings: SuperResolutionSettings) -> tuple[PicturePairs, PicturePairs | None]:
    """The pictures to train with, and those that a search judges by, if any are held out."""
    folder = BUNDLED / "train"
    if settings.data_dir is not None:
        folder = _folder(settings.data_dir, "--data-dir")
    pairs = load_pairs(folder, settings.scale, patch=settings.patch, cache=settings.cache_dir)
    if settings.held_out == 0:
        return pairs, None
    kept = len(pairs) - max(1, round(settings.held_out * len(pairs)))
    if kept < 1:
        raise AnywidthError(
            f"{settings.given('held_out')}: the {len(pairs)} pictures of {folder} leave none to "
            "train with; hold out fewer"
        )
    return pairs.part(0, kept), pairs.part(kept, len(pairs))


def load_evaluation_sets(settings: SuperResolutionSettings) -> dict[str, PicturePairs]:
    """The evaluation pictures by set, the smallest set first."""
    # After the border is cut, the window of SSIM must fit.
    smallest = math.ceil((WINDOW + 2 * settings.scale) / settings.scale)
    sets = {
        name: load_pairs(
            folder,
            settings.scale,
            split="valid",
            patch=smallest,
            cache=settings.cache_dir,
            subfolders=subfolders,
        )
        for name, (folder, subfolders) in _evaluation_folders(settings).items()
    }
    return dict(sorted(sets.items(), key=lambda item: (len(item[1]), item[0])))


def _evaluation_folders(settings: SuperResolutionSettings) -> dict[str, tuple[Path, bool]]:
    """The folder of each set, and whether its subfolders belong to it.

    The sets are the subfolders of `eval_dir`, and the pictures beside them as one more set; or
    DIV2K's validation pictures; or the bundled ones.
    """
    given = settings.eval_dir or settings.data_dir
    if given is not None and (Path(given) / "DIV2K_valid_HR").is_dir():
        return {"DIV2K": (Path(given), True)}
    if settings.eval_dir is None:
        return {"bundled": (BUNDLED / "eval", True)}
    folder = _folder(settings.eval_dir, "--eval-dir")
    paths = find_images(folder)
    inside = {path.relative_to(folder).parts[0] for path in paths if path.parent != folder}
    found = {name: (folder / name, True) for name in inside if not name.startswith(".")}
    own = folder.resolve().name
    if any(path.parent == folder for path in paths):
        found[f"{own} itself" if own in found else own] = (folder, False)
    return found or {own: (folder, True)}


def _folder(place: str, option: str) -> Path:
    if not Path(place).is_dir():
        raise AnywidthError(
            f"{place} is not a folder: give the folder of the pictures with {option} FOLDER"
        )
    return Path(place)
