"""The super-resolution task: what it trains, that it resumes, and what its commands say."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import command, succeed
from PIL import Image
from torch import Tensor

import anywidth as aw
from anywidth.app.runs.loop import scheduled_rate
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.tasks.super_resolution.networks import build_model, start_from_bicubic
from anywidth.app.tasks.super_resolution.pictures import BUNDLED, load_evaluation_sets
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.super_resolution.task import (
    SuperResolutionSettings,
    distillation_of,
    open_trained,
    train_run,
)
from anywidth.app.tasks.super_resolution.upscaling import evaluate, evaluate_bicubic, super_resolve
from anywidth.errors import AnywidthError
from anywidth.files import load_tensors
from anywidth.models.wdsr import wdsr

TINY = SuperResolutionSettings(
    channels=8,
    blocks=1,
    patch=12,
    batch_size=4,
    epochs=2,
    steps_per_epoch=6,
    warmup_steps=2,
    log_every=1,
    checkpoint_every=5,
    device="cpu",
)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small picture, to train on and to evaluate on."""
    folder = tmp_path_factory.mktemp("pictures")
    with Image.open(BUNDLED / "train" / "city.png") as image:
        for name in ("train", "eval"):
            (folder / name / "SetA").mkdir(parents=True)
            image.crop((60, 60, 140, 140)).save(folder / name / "SetA" / "picture.png")
    return folder


@pytest.fixture
def settings(pictures: Path) -> SuperResolutionSettings:
    return replace(TINY, data_dir=str(pictures / "train"), eval_dir=str(pictures / "eval"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = replace(TINY, data_dir=str(pictures / "train"), eval_dir=str(pictures / "eval"))
    assert train_run(Run.create(folder, settings), settings)
    return folder


# ---- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [32, 33, 47, 64])
def test_every_width_is_the_wdsr_of_that_many_channels(channels: int) -> None:
    model = build_model(SuperResolutionSettings(blocks=2))
    small = aw.extract(model, channels / 64)
    assert small.state_dict().keys() == wdsr(channels, 2).state_dict().keys()
    for name, tensor in wdsr(channels, 2).state_dict().items():
        assert small.state_dict()[name].shape == tensor.shape
    weights = 9 * (3 * channels + 2 * 2 * 4 * channels**2 + 12 * channels) + 25 * 3 * 12
    assert aw.macs(model, channels / 64) == 48 * 48 * weights


def test_an_individual_network_is_built_for_its_width() -> None:
    model = build_model(replace(TINY, channels=64, method="i", width=0.5, bicubic_start=False))
    torch.manual_seed(TINY.seed)
    plain = wdsr(32, TINY.blocks)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with pytest.raises(AnywidthError, match="width"):
        replace(TINY, method="i", width=1.5).check()


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_the_skip_starts_as_bicubic_upscaling(scale: int) -> None:
    model = wdsr(4, 1, scale)
    start_from_bicubic(model)
    with torch.no_grad():
        model.tail.parametrizations.weight.original0.zero_()
    images = torch.rand(1, 3, 9, 11)
    inside = slice(2 * scale, -2 * scale)  # the network pads with the mean, bicubic mirrors
    torch.testing.assert_close(
        model(images)[..., inside, inside], upscale(images, scale)[..., inside, inside]
    )


def test_tiles_leave_no_seam() -> None:
    model = build_model(TINY).eval()
    images = torch.rand(1, 3, 300, 20)
    with aw.at_width(model, 0.5), torch.no_grad():
        torch.testing.assert_close(super_resolve(model, images), model(images).clamp(0, 1))


def test_losses_and_schedule() -> None:
    assert distillation_of(replace(TINY, distill="none")) is None
    assert distillation_of(replace(TINY, method="i")) is None
    near, far = torch.zeros(4), torch.full((4,), 0.5)
    absolute, squared = (distillation_of(replace(TINY, distill=kind)) for kind in ("l1", "l2"))
    assert absolute is not None
    assert squared is not None
    assert absolute(near, far).item() == pytest.approx(0.5)
    assert squared(near, far).item() == pytest.approx(0.25)
    rates = [scheduled_rate(step, 100, 10, 1.0, "cosine") for step in range(100)]
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("distill", ["none", "l2"])
def test_training_beats_bicubic_at_every_width(
    settings: SuperResolutionSettings, tmp_path: Path, distill: str
) -> None:
    settings = replace(
        settings,
        distill=distill,
        epochs=1,
        steps_per_epoch=100,
        learning_rate=4e-3,
        log_every=50,
        checkpoint_every=1000,
    )
    assert train_run(Run.create(tmp_path / "run", settings), settings)
    trained = open_trained(tmp_path / "run", "cpu")
    bicubic = evaluate_bicubic(trained.pictures())["psnr"]
    untrained = evaluate(build_model(settings).eval(), trained.pictures())["psnr"]
    assert untrained < bicubic + 0.1
    for width in (0.5, 0.75, 1.0):
        with aw.at_width(trained.model, width):
            assert trained.evaluate(trained.model)["psnr"] > bicubic + 1


def test_a_stopped_run_resumes_to_the_same_weights(
    settings: SuperResolutionSettings,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anywidth.app.runs import loop as training

    saved = training.save_checkpoint

    def save_and_die(run: Run, step: aw.SandwichStep) -> None:
        saved(run, step)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_run(Run.create(tmp_path / "run", settings), settings)
    monkeypatch.undo()
    torch.rand(3)
    assert train_run(Run.open(tmp_path / "run", writing=True), settings)
    whole, _ = load_tensors(finished / "model.safetensors")
    resumed, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert read_metrics(finished / "metrics.csv") == read_metrics(tmp_path / "run" / "metrics.csv")


def test_metrics_are_logged_for_both_ends(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {"loss/1.0", "loss/0.5"} <= rows[0].keys()
    validated = [row["step"] for row in rows if "validation_psnr/0.5" in row]
    assert validated == [6, 12]


def test_bfloat16_trains(settings: SuperResolutionSettings, tmp_path: Path) -> None:
    settings = replace(settings, precision="bfloat16", epochs=1, steps_per_epoch=2)
    assert train_run(Run.create(tmp_path / "run", settings), settings)
    assert load_tensors(tmp_path / "run/model.safetensors")[0]["head.bias"].dtype == torch.float32


# ---- evaluating ----------------------------------------------------------------------------------


def test_sets_are_named_by_their_folders(pictures: Path, tmp_path: Path) -> None:
    bundled = load_evaluation_sets(TINY)
    assert {name: len(pairs) for name, pairs in bundled.items()} == {"bundled": 4}
    one = load_evaluation_sets(replace(TINY, eval_dir=str(pictures / "eval" / "SetA")))
    assert list(one) == ["SetA"]
    for name, count in (("Large", 2), ("Small", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (40, 40), "teal").save(tmp_path / name / f"{number}.png")
    sets = load_evaluation_sets(replace(TINY, eval_dir=str(tmp_path)))
    assert list(sets) == ["Small", "Large"]
    values = evaluate_bicubic(sets)
    expected = ["psnr", "ssim", "psnr_Small", "ssim_Small", "psnr_Large", "ssim_Large"]
    assert list(values) == expected


def test_pictures_beside_subfolders_are_a_set_too(tmp_path: Path) -> None:
    folder = tmp_path / "Mine"
    for path in ("a.png", "b.png", "Set5/c.png", "Mine/d.png", "notes/e.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), "teal").save(folder / path, "PNG")
    sets = load_evaluation_sets(replace(TINY, eval_dir=str(folder)))
    names = {name: pairs.names for name, pairs in sets.items()}
    assert names == {"Mine": ("d",), "Set5": ("c",), "Mine itself": ("a", "b")}


@pytest.mark.parametrize(("scale", "smallest"), [(2, 16), (3, 18), (4, 20)])
def test_pictures_too_small_for_ssim_are_left_out_by_name(
    scale: int, smallest: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (smallest, 40), "teal").save(tmp_path / "enough.png")
    Image.new("RGB", (40, smallest - 1), "teal").save(tmp_path / "thumbnail.png")
    sets = load_evaluation_sets(replace(TINY, scale=scale, eval_dir=str(tmp_path)))
    assert re.search(r"1 of 2 images.*: thumbnail", caplog.text)
    (pairs,) = sets.values()
    assert pairs.names == ("enough",)
    assert evaluate_bicubic(sets)["ssim"] > 0.99


def test_the_figure_is_that_of_8_bit_pictures(finished: Path) -> None:
    trained = open_trained(finished, "cpu")
    low, high = trained.pictures()["SetA"][0]

    def written_out(model: torch.nn.Module) -> float:
        made = (model(low[None] / 255) * 255 + 0.5).floor().clamp(0, 255)
        weights = torch.tensor([65.481, 128.553, 24.966]).view(1, 3, 1, 1) / 255

        def luma(levels: Tensor) -> Tensor:
            return (levels * weights).sum(1)[:, 2:-2, 2:-2].double()

        error = (luma(made) - luma(high[None].float())).square().mean()
        return float(10 * torch.log10(255**2 / error))

    with aw.at_width(trained.model, 0.75), torch.no_grad():
        found = trained.evaluate(trained.model)["psnr"]
        assert found == pytest.approx(written_out(trained.model), abs=1e-4)


# ---- commands ------------------------------------------------------------------------------------


def test_spectrum_compare_and_report(
    finished: Path,
) -> None:
    widths = ("--widths", "0.5,0.75,1.0")
    succeed("spectrum", finished, *widths, "--no-latency")
    with open(finished / "spectrum.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["width", "macs", "parameters", "psnr", "ssim", "latency_ms"]
    assert [row["width"] for row in rows] == ["0.5", "0.75", "1.0"]
    assert (finished / "plots" / "spectrum.svg").read_text().startswith("<?xml")
    succeed("report", finished)
    page = (finished / "report.html").read_text()
    assert "<h2>Crops</h2>" in page
    assert "data:image/png;base64," in page
    assert "batch norm" in succeed("calibrate", finished).output
    answer = command("predict", finished, BUNDLED / "eval" / "chart.png")
    assert answer.code == 2
    assert f"anywidth upscale {finished}" in answer.errors


def test_individual_networks_stand_beside_their_width(
    settings: SuperResolutionSettings, tmp_path: Path
) -> None:
    settings = replace(settings, method="i", width=0.5, epochs=1, steps_per_epoch=1)
    folder = tmp_path / "run"
    assert train_run(Run.create(folder, settings), settings)
    succeed("spectrum", folder, "--no-latency")
    with open(folder / "spectrum.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["width"] == "0.5"


def test_train_command_goes_from_recipe_to_report(
    settings: SuperResolutionSettings, tmp_path: Path
) -> None:
    network = ["--channels", 4, "--blocks", 1, "--high", 0.75]
    small = [*network, "--patch", 12, "--epochs", 1, "--steps-per-epoch", 2]
    folders = ["--data-dir", settings.data_dir, "--eval-dir", settings.eval_dir]
    out = ["--out", tmp_path / "run", "--device", "cpu"]
    answer = succeed("train", "sr", *folders, *small, *out)
    with open(tmp_path / "run" / "spectrum.csv", newline="") as file:
        widths = [row["width"] for row in csv.DictReader(file)]
    assert (widths[0], widths[-1]) == ("0.5", "0.75")
    for width in widths:
        assert re.search(rf"^ *{re.escape(width)} ", answer.output, re.MULTILINE)
    assert "US-WDSR" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_finds_its_pictures_from_everywhere(
    settings: SuperResolutionSettings,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(pictures / "eval", tmp_path / "begun" / "eval")
    small = ["--channels", 4, "--blocks", 1, "--patch", 12, "--epochs", 1, "--steps-per-epoch", 1]
    folders = ["--data-dir", settings.data_dir, "--eval-dir", "eval"]
    monkeypatch.chdir(tmp_path / "begun")
    out = ["--out", tmp_path / "run", "--device", "cpu", "--no-report"]
    succeed("train", "sr", *folders, *small, *out)
    assert Run.open(tmp_path / "run").settings_data["eval_dir"] == str(tmp_path / "begun" / "eval")
    monkeypatch.chdir(tmp_path)
    evaluate = ["spectrum", "run", "--widths", "0.5,1.0", "--no-latency", "--device", "cpu"]
    succeed(*evaluate)
    before = (tmp_path / "run" / "spectrum.csv").read_bytes()
    (tmp_path / "begun" / "eval").rename(tmp_path / "moved")
    (tmp_path / "run" / "spectrum.csv").unlink()
    answer = command(*evaluate)
    assert answer.code == 2
    assert "eval" in answer.errors
    succeed(*evaluate, "--eval-dir", "moved")
    assert (tmp_path / "run" / "spectrum.csv").read_bytes() == before
    succeed("report", "run", "--eval-dir", "moved", "--device", "cpu")
    succeed("train", "--resume", "run", "--eval-dir", "moved")


def bad_folder(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "mismatch":
        for name, side in (("DIV2K_train_HR/0001.png", 64), ("0001x2.png", 30)):
            low = folder / "DIV2K_train_LR_bicubic" / "X2"
            path = folder / name if "HR" in name else low / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (side, side)).save(path)
    if kind == "broken":
        (folder / "torn.png").write_bytes(b"\x89PNG\r\n")
    if kind == "tiny":
        Image.new("RGB", (10, 10)).save(folder / "tiny.png")
    return folder


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("empty", [], "images"),
        ("mismatch", [], "32x32"),
        ("broken", [], "torn.png"),
        ("tiny", [], "48x48"),
        ("empty", ["--scale", "5"], "scale"),
        (None, ["--eval-dir", "/nowhere"], "/nowhere"),
        (None, ["--eval-dir", "/nowhere"], "--eval-dir"),
        (None, ["--data-dir", "/nowhere"], "--data-dir"),
        (None, ["--distill", "l3"], "l2"),
        (None, ["--epochs", "0"], "epochs"),
        (None, ["--log-every", "0"], "--log-every"),
        (None, ["--chanels", "8"], "--channels"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    kind: str | None, options: list[str], said: str, tmp_path: Path
) -> None:
    data = [] if kind is None else ["--data-dir", bad_folder(tmp_path, kind)]
    out = ["--out", tmp_path / "run", "--device", "cpu"]
    answer = command("train", "sr", *data, *options, *out)
    assert answer.code == 2
    assert said in answer.errors
    assert len(answer.errors.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
