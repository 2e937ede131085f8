"""`anywidth upscale` on pictures of every kind."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import command
from PIL import Image

import anywidth as aw
from anywidth.app.runs.loop import save_final
from anywidth.app.runs.run import Run
from anywidth.app.tasks.super_resolution.networks import build_model
from anywidth.app.tasks.super_resolution.pictures import BUNDLED
from anywidth.app.tasks.super_resolution.task import SuperResolutionSettings, open_trained


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its initial weights, which upscale nearly as bicubic does."""
    return untrained(tmp_path_factory.mktemp("upscale") / "run")


def untrained(folder: Path, **choices: Any) -> Path:
    settings = SuperResolutionSettings(channels=4, blocks=1, device="cpu", **choices)
    save_final(Run.create(folder, settings), build_model(settings), {"steps": 0})
    return folder


@pytest.fixture
def upscale(run: Path, tmp_path: Path):
    """Saves an image, runs the command on it, and gives back its answer and what it wrote."""

    def call(image: Image.Image | bytes, *options: object, name: str = "picture.png"):
        source, target = tmp_path / name, tmp_path / "large.png"
        if isinstance(image, bytes):
            source.write_bytes(image)
        else:
            image.save(source)
        given = options or ("--out", target)
        answer = command("upscale", run, source, "--device", "cpu", *given)
        made = None
        if target.exists():
            with Image.open(target) as opened:
                opened.load()
                made = opened.copy()
        return answer, made

    return call


def photo(mode: str = "RGB", size: tuple[int, int] = (37, 23)) -> Image.Image:
    with Image.open(BUNDLED / "train" / "sunflower.png") as image:
        return image.convert("RGB").resize(size).convert(mode)


def difference(made: Image.Image, source: Image.Image) -> float:
    """How far the picture, shrunk again, is from what was given, in 8-bit levels."""
    small = np.asarray(made.resize(source.size, Image.Resampling.BOX)).astype(float)
    return float(np.abs(small - np.asarray(source).astype(float)).mean())


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_modes_are_kept(upscale, mode: str) -> None:
    source = photo(mode)
    if mode.endswith("A"):
        source.putalpha(Image.linear_gradient("L").resize(source.size))
    answer, made = upscale(source)
    assert answer.code == 0, answer.errors
    assert made.mode == mode
    assert made.size == (74, 46)
    assert difference(made, source) < 12


@pytest.mark.parametrize("mode", ["1", "P", "CMYK"])
def test_other_modes_become_grey_or_rgb(upscale, mode: str) -> None:
    name = "picture.tif" if mode == "CMYK" else "picture.png"
    answer, made = upscale(photo(mode), name=name)
    assert answer.code == 0, answer.errors
    assert made.mode == ("L" if mode == "1" else "RGB")


def test_a_transparent_palette_keeps_its_transparency(upscale) -> None:
    source = photo("P")
    source.info["transparency"] = source.getpixel((0, 0))
    answer, made = upscale(source)
    assert answer.code == 0, answer.errors
    assert made.mode == "RGBA"
    assert made.getextrema()[3][0] < 255


def test_16_bits_are_kept(upscale) -> None:
    levels = np.linspace(0, 65535, 30 * 40).reshape(30, 40).astype(np.uint16)
    answer, made = upscale(Image.fromarray(levels))
    assert answer.code == 0, answer.errors
    assert made.mode.startswith("I")
    found = np.asarray(made).astype(np.int64)
    assert found.shape == (60, 80)
    assert len(np.unique(found)) > 1000
    shrunk = found.reshape(30, 2, 40, 2).mean((1, 3))
    # Inside, away from the border that the network pads.
    assert np.abs(shrunk - levels)[4:-4, 4:-4].mean() < 4000


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (3, 5), (301, 7)])
def test_any_size_is_taken(upscale, size: tuple[int, int]) -> None:
    answer, made = upscale(photo(size=size))
    assert answer.code == 0, answer.errors
    assert made.size == (2 * size[0], 2 * size[1])


def test_the_picture_is_what_the_network_makes_at_that_width(
    upscale, run: Path, tmp_path: Path
) -> None:
    source = photo()
    answer, made = upscale(source, "--width", 0.5, "--out", tmp_path / "large.png")
    assert answer.code == 0, answer.errors
    trained = open_trained(run, "cpu", with_data=False)
    pixels = torch.from_numpy(np.array(source)).permute(2, 0, 1)[None] / 255
    with aw.at_width(trained.model, 0.5), torch.no_grad():
        expected = (trained.model(pixels) * 255 + 0.5).floor().clamp(0, 255)
    found = torch.from_numpy(np.array(made)).permute(2, 0, 1)[None]
    assert (found.float() - expected).abs().max() <= 1


def test_exif_orientation_is_obeyed(upscale) -> None:
    source = photo()
    exif = source.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    source.save(file, "JPEG", exif=exif)
    answer, made = upscale(file.getvalue(), name="turned.jpg")
    assert answer.code == 0, answer.errors
    assert made.size == (46, 74)


def test_the_default_name_lies_beside_the_image(upscale, tmp_path: Path) -> None:
    answer, _ = upscale(photo(), "--width", 0.75)
    assert answer.code == 0, answer.errors
    with Image.open(tmp_path / "picture-x2.png") as image:
        assert image.size == (74, 46)


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        (b"not a picture", (), "picture"),
        (photo(), ("--out", "large.jpg"), ".png"),
        (photo(), ("--out", "/nowhere/large.png"), "/nowhere"),
        (photo(), ("--width", "0.3"), "0.3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(upscale, image, options, said) -> None:
    answer, _ = upscale(image, *options)
    assert answer.code == 2
    assert said in answer.errors
    assert len(answer.errors.strip().splitlines()) == 1


def test_floating_point_pixels_are_refused(upscale) -> None:
    answer, _ = upscale(photo().convert("L").convert("F"), name="float.tif")
    assert answer.code == 2
    assert "range" in answer.errors


def test_a_missing_image_is_named_even_where_the_target_exists(run: Path, tmp_path: Path) -> None:
    photo().save(tmp_path / "large.png")
    answer = command("upscale", run, tmp_path / "gone.png", "--out", tmp_path / "large.png")
    assert answer.code == 2
    assert "gone.png" in answer.errors


def test_the_image_itself_is_not_overwritten(upscale, tmp_path: Path) -> None:
    answer, _ = upscale(photo(), "--out", tmp_path / "picture.png")
    assert answer.code == 2
    assert "itself" in answer.errors


# ---- one width alone -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def individual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished I-Net of width 0.5, untrained, in a folder whose name looks like markup."""
    folder = tmp_path_factory.mktemp("one") / "a [bold] name of some length, as folders have them"
    untrained(folder, method="i", width=0.5)
    photo().save(folder / "picture.png")
    return folder


@pytest.mark.parametrize("options", [(), ("--width", 0.5)])
def test_an_individual_network_upscales_at_its_one_width(
    individual: Path, options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    answer = command("upscale", individual, individual / "picture.png", *options, "--device", "cpu")
    assert answer.code == 0, answer.errors
    target = individual / "picture-x2.png"
    assert str(target) in answer.output  # not broken over lines
    assert "74x46" in answer.output
    trained = open_trained(individual, "cpu", with_data=False)
    assert trained.model.head.out_channels == 2


@pytest.mark.parametrize("width", [0.75, 1.0])
def test_an_individual_network_upscales_at_no_other_width(individual: Path, width: float) -> None:
    target = individual / "other.png"
    picture = individual / "picture.png"
    answer = command("upscale", individual, picture, "--width", width, "--out", target)
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert "0.5" in line
    assert not target.exists()


def test_the_default_is_the_widest_there_is(tmp_path: Path) -> None:
    untrained(tmp_path / "run", high=0.75)
    photo().save(tmp_path / "picture.png")
    answer = command("upscale", tmp_path / "run", tmp_path / "picture.png", "--device", "cpu")
    assert answer.code == 0, answer.errors
    assert "0.75" in answer.output


def test_an_individual_network_logs_under_its_one_width(tmp_path: Path) -> None:
    small = ("--channels", 4, "--blocks", 1, "--patch", 12, "--epochs", 1, "--steps-per-epoch", 2)
    one = ("--method", "i", "--width", 0.5, "--log-every", 1, "--validation-pictures", 1)
    out = ("--out", tmp_path / "run", "--device", "cpu", "--no-report")
    answer = command("train", "sr", *small, *one, *out)
    assert answer.code == 0, answer.errors
    columns = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"loss/0.5", "validation_psnr/0.5"} <= set(columns)
    assert not [name for name in columns if name.endswith("/1.0")]
