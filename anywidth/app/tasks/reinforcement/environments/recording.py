"""A game as a video file: GIF, or MP4 if ffmpeg is installed."""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anywidth.errors import AnywidthError, packages_for
from anywidth.files import write_atomically

SHOWN_WIDTH = 320
"""Screens are enlarged to about this many pixels, by a whole factor."""


@dataclass(frozen=True)
class Recording:
    """A recorded game: (height, width, 3) RGB frames in uint8, one per step, and its true score."""

    frames: Sequence[np.ndarray]
    score: float
    frames_per_second: int
    """The speed at which people play it."""


def check_video_path(path: Path) -> None:
    """Raise before a long game, not after it, if a recording could not be written there."""
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise AnywidthError(f"{path}: choose a name that ends in .gif or .mp4")
    if not path.parent.is_dir():
        raise AnywidthError(f"{path}: there is no folder {path.parent}")
    if path.suffix.lower() == ".mp4":
        _ffmpeg()


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording as an animated GIF or an MP4, by the name of the file."""
    check_video_path(path)
    is_gif = path.suffix.lower() == ".gif"
    write_atomically(path, _gif(recording) if is_gif else _mp4(recording))


# ---- GIF -------------------------------------------------------------------------------------


def _gif(recording: Recording) -> bytes:
    with packages_for("a GIF", "'anywidth[cli]'"):
        from PIL import Image

    factor = _factor(recording)
    palette = _palette(recording.frames)
    images = []
    for frame in recording.frames:
        if palette is None:
            image = Image.fromarray(frame).quantize(256)
        else:
            colors, numbers = palette
            image = Image.fromarray(numbers[_packed(frame)])
            image.putpalette(colors.tobytes())
        size = (image.width * factor, image.height * factor)
        images.append(image.resize(size, Image.Resampling.NEAREST))
    file = io.BytesIO()
    images[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=_durations(len(images), recording.frames_per_second),
        loop=0,
        optimize=False,
    )
    return file.getvalue()


def _durations(count: int, frames_per_second: int) -> list[int]:
    """Milliseconds per frame: GIF counts hundredths of a second, so durations alternate."""
    times = [10 * round(100 * index / frames_per_second) for index in range(count + 1)]
    return [after - before for before, after in itertools.pairwise(times)]


def _palette(frames: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """The colours of a recording and the index of each; None if there are too many for GIF.

    An Atari has 128 colours, so its games are stored exactly.
    """
    is_seen = np.zeros(2**24, bool)
    for frame in frames:
        is_seen[_packed(frame)] = True
    seen = np.flatnonzero(is_seen)
    if len(seen) > 256:
        return None
    numbers = np.zeros(2**24, np.uint8)
    numbers[seen] = np.arange(len(seen))
    return np.stack([seen >> 16, seen >> 8 & 255, seen & 255], 1).astype(np.uint8), numbers


def _packed(frame: np.ndarray) -> np.ndarray:
    red, green, blue = (frame[..., channel].astype(np.uint32) for channel in range(3))
    return red << 16 | green << 8 | blue


# ---- MP4 -------------------------------------------------------------------------------------


def _mp4(recording: Recording) -> bytes:
    height, width, _ = recording.frames[0].shape
    factor = _factor(recording)
    # Most players need even sizes and this pixel format.
    filters = (
        f"scale=iw*{factor}:ih*{factor}:flags=neighbor,format=rgb24,pad=ceil(iw/2)*2:ceil(ih/2)*2"
    )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "game.mp4"
        command = [
            *(_ffmpeg(), "-loglevel", "error"),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"),
            *("-r", str(recording.frames_per_second), "-i", "-"),
            *("-vf", filters, "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(target)),
        ]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)
            assert process.stdin is not None
            # If it stops reading, its message is reported below.
            with contextlib.suppress(BrokenPipeError), process.stdin as stream:
                for frame in recording.frames:
                    stream.write(np.ascontiguousarray(frame).data)
            if process.wait() != 0:
                errors.seek(0)
                said = " ".join(errors.read().decode(errors="replace").split())
                raise AnywidthError(f"ffmpeg did not write the video ({said}): choose .gif instead")
        return target.read_bytes()


def _ffmpeg() -> str:
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ModuleNotFoundError, RuntimeError) as error:
        raise AnywidthError(
            "MP4 needs the program ffmpeg: choose a name that ends in .gif, or install it with "
            "pip install imageio-ffmpeg"
        ) from error


def _factor(recording: Recording) -> int:
    return max(1, SHOWN_WIDTH // recording.frames[0].shape[1])
