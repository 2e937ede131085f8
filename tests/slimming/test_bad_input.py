"""Bad input: a clear error that names what was given and what to do; the model as it was."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from agreement import convert
from command_line import command
from torch import Tensor, nn

import anywidth as aw
from anywidth._version import __version__
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.recipes import AnySettings
from anywidth.app.tasks.super_resolution.task import SuperResolutionSettings
from anywidth.slimming.convert import track_statistics


def network(channels: int = 16) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(),
                         nn.Conv2d(channels, 4, 1))  # fmt: skip


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def model(x: Tensor) -> nn.Module:
    return convert(network(), x, aw.WidthRange(0.5, 1.0, 2))


USES = {
    "set_width": aw.set_width,
    "at_width": lambda model, width: aw.at_width(model, width).__enter__(),
    "extract": aw.extract,
    "macs": aw.macs,
    "parameter_count": aw.parameter_count,
    "latency": aw.latency,
    "track_statistics": track_statistics,
    "resolve": lambda model, width: aw.plan_of(model).resolve(width),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("width", "message"),
    [
        (0, "width 0"),
        (-0.5, "-0.5"),
        (1.5, "1.5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("half", "'half'"),
        (None, "None"),
        ([0.5], r"\[0.5\]"),
        (0.25, "range"),
        (aw.ChannelConfig((("elsewhere", 8),)), "'elsewhere'"),
        (aw.ChannelConfig((("0", 99), ("3", 4))), "99"),
        (aw.ChannelConfig((("0", 8.5), ("3", 4))), "8.5"),
        (aw.ChannelConfig((("0", "8"), ("3", 4))), "'8'"),
        (aw.ChannelConfig((("0", 0), ("3", 4))), "'0'"),
        (aw.ChannelConfig((("0", 8), ("3", 2))), "'3'"),
        ({"nowhere": 0.5}, "'nowhere'"),
        ({"0": 2}, "width 2"),
    ],
)
def test_bad_widths(model: nn.Module, use: str, width, message: str) -> None:
    with pytest.raises(aw.AnywidthError, match=message):
        USES[use](model, width)
    assert model[0].out_channels == 16


def test_configuration_of_another_model(model: nn.Module) -> None:
    other = convert(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(2, 4))
    with pytest.raises(aw.AnywidthError, match="another"):
        aw.set_width(model, aw.plan_of(other).narrowest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "low"),
        ((0.5, 0.25), "exceed"),
        ((0.25, 1.25), "high"),
        ((math.nan, 1.0), "low"),
        (("a", 1.0), "low"),
        ((True, 1.0), "low"),
        ((0.25, 1.0, 0), "divisor"),
        ((0.25, 1.0, -8), "-8"),
        ((0.25, 1.0, 2.5), "2.5"),
    ],
)
def test_bad_ranges(arguments, message: str) -> None:
    with pytest.raises(aw.AnywidthError, match=message):
        aw.WidthRange(*arguments)


def test_model_that_branches_on_values(x: Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return y if y.sum() > 0 else -y

    model = Branching()
    before = dict(vars(model))
    with pytest.raises(aw.AnywidthError, match="Branching"):
        aw.slimmable(model, example_input=x)
    assert vars(model) == before
    assert model.training
    assert capfd.readouterr() == ("", ""), "torch printed its graph"


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 3), (2, 3, 1, 1)])
def test_example_of_the_wrong_shape(shape) -> None:
    model = network().eval()
    with pytest.raises(aw.AnywidthError, match=r"\(2, "):
        aw.plan(model, torch.randn(shape))
    assert not model.training
    assert type(model[0]) is nn.Conv2d


def test_converting_twice(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(aw.AnywidthError, match="set_width"):
        aw.slimmable(model, example_input=x)
    with pytest.raises(aw.AnywidthError, match="plan_of"):
        aw.plan(model, x)
    aw.set_width(model, 0.5)
    assert model[0].out_channels == 8


@pytest.mark.parametrize("use", [name for name in USES if name != "resolve"])
def test_model_never_converted(use: str) -> None:
    model = network()
    with pytest.raises(aw.AnywidthError, match="slimmable"):
        USES[use](model, 0.5)
    with pytest.raises(aw.AnywidthError, match="converted"):
        USES[use]("a string", 0.5)


def test_wrapped_model(model: nn.Module) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    with pytest.raises(aw.AnywidthError, match=r"model\.module"):
        aw.set_width(Wrapper(), 0.5)


def test_plan_of_another_network(x: Tensor) -> None:
    wider = aw.plan(network(32), x)
    model = network()
    with pytest.raises(aw.AnywidthError, match="shape"):
        aw.slimmable(model, wider)
    with pytest.raises(aw.AnywidthError, match=r"0\.weight"):
        aw.slimmable(nn.Sequential(nn.ReLU()), wider)
    longer = nn.Sequential(*network(), nn.Conv2d(4, 4, 1))
    with pytest.raises(aw.AnywidthError, match=r"4\.weight"):
        aw.slimmable(longer, aw.plan(network(), x))
    assert type(model[0]) is nn.Conv2d


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither"),
        ({"plan": {"groups": 3}}, "dict"),
        ({"widths": (0.25, 1.0)}, "WidthRange"),
    ],
)
def test_bad_arguments_of_slimmable(arguments, message: str, x: Tensor) -> None:
    if "widths" in arguments:
        arguments = {**arguments, "example_input": x}
    with pytest.raises(aw.AnywidthError, match=message):
        aw.slimmable(network(), **arguments)


def test_not_a_module(x: Tensor) -> None:
    with pytest.raises(aw.AnywidthError, match="str"):
        aw.slimmable("resnet50", example_input=x)
    with pytest.raises(aw.AnywidthError, match="str"):
        aw.plan("resnet50", x)


def test_model_that_is_random_in_evaluation(x: Tensor) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) + torch.rand_like(x[:, :1]))

    model = Noisy()
    with pytest.raises(aw.AnywidthError, match="random"):
        aw.slimmable(model, example_input=x)
    assert type(model.one) is nn.Conv2d
    aw.slimmable(model, example_input=x, verified=False)


@pytest.mark.parametrize(
    "arguments",
    [{"repeats": 0}, {"batch_size": 0}, {"repeats": 2.5}, {"batch_size": "a"}, {"warmup": -1}],
)
def test_bad_latency_arguments(model: nn.Module, arguments) -> None:
    with pytest.raises(aw.AnywidthError, match=next(iter(arguments))):
        aw.latency(model, 0.5, **arguments)


def test_a_shape_that_is_none(model: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="input_shape"):
        aw.latency(model, 0.5, input_shape=8)


def test_a_configuration_of_a_mapping(model: nn.Module) -> None:
    config = aw.ChannelConfig({"0": 8, "3": 4})
    assert config == aw.plan_of(model).resolve(0.5)
    aw.set_width(model, config)


def test_too_small_a_lattice(model: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="lattice"):
        aw.plan_of(model).lattice(1)


def test_configuration_from_something_else() -> None:
    with pytest.raises(aw.AnywidthError, match="mapping"):
        aw.ChannelConfig.from_json([1, 2])


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "option", "value", "expected"),
    [
        ("fashion_mnist_demo", "learning_rate", "-1", "a number above 0"),
        ("fashion_mnist_demo", "learning_rate", "0", "a number above 0"),
        ("fashion_mnist_demo", "momentum", "-1", "from 0 to below 1"),
        ("fashion_mnist_demo", "momentum", "5", "from 0 to below 1"),
        ("fashion_mnist_demo", "weight_decay", "-1", "at least 0"),
        ("fashion_mnist_demo", "warmup_epochs", "-1", "at least 0"),
        ("fashion_mnist_demo", "workers", "-1", "at least 0"),
        ("fashion_mnist_demo", "calibration_samples", "-4", "at least 2"),
        ("fashion_mnist_demo", "calibration_samples", "0", "at least 2"),
        ("fashion_mnist_demo", "limit", "0", "at least 1"),
        ("fashion_mnist_demo", "truth", "2", "from 0 to 1"),
        ("fashion_mnist_demo", "switches", "0.5,0.5", "widths that differ"),
        ("fashion_mnist_demo", "switches", "0.5,2", r"in \(0, 1\]"),
        ("fashion_mnist_demo", "width", "0.25", "--method i"),
        ("fashion_mnist_demo", "total_stride", "4", "8, 16 or 32"),
        ("fashion_mnist_demo", "strides", "1,1,3,2,2", "numbers 1 or 2"),
        ("fashion_mnist_demo", "strides", "1,1,2,2", "expected five"),
        ("sr", "learning_rate", "-1", "a number above 0"),
        ("sr", "warmup_steps", "-1", "at least 0"),
        ("sr", "validation_pictures", "0", "at least 1"),
        ("sr", "width", "0.75", "--method i"),
        ("rl", "learning_rate", "-1", "a number above 0"),
        ("rl", "discount", "2", "from 0 to 1"),
        ("rl", "smoothing", "-1", "from 0 to 1"),
        ("rl", "clip", "0", "a number above 0"),
        ("rl", "gradient_clip", "0", "a number above 0"),
        ("rl", "entropy_weight", "-1", "at least 0"),
        ("rl", "width", "0.5", "--method i"),
    ],
)
def test_a_number_out_of_range_is_refused_before_there_is_a_run(
    recipe: str, option: str, value: str, expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def create(*arguments: object) -> Run:
        pytest.fail("a run was begun")

    monkeypatch.setattr(Run, "create", create)
    option_given = f"--{option.replace('_', '-')}={value}"
    answer = command("train", recipe, option_given, "--out", tmp_path / "run")
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert re.search(rf"^anywidth: {option}=.*{re.escape(value[:2])}.*{expected}", line)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--method i --truth 0.3", "truth=0.3 is not read with method='i': leave out --truth"),
        ("--method s --truth 0.3", "truth=0.3 is not read with method='s'"),
        ("--method i --nonuniform", "nonuniform=True is not read with method='i'"),
        ("--private-affine", "private_affine=True is not read with method='us'"),
        ("--rule random --distill", "distill=True is not read with rule='random'"),
        ("--rule min+random --truth 0.3", "truth=0.3 is not read with rule='min+random'"),
        ("--no-distill --truth 0.3", "truth=0.3 is not read with distill=False"),
        ("--no-distill --temperature 2", "temperature=2.0 is not read with distill=False"),
        ("--data folder --data-dir / --cutout 8", "cutout=8 is not read with folders of images"),
        ("--data folder --data-dir / --crop-padding 2", "crop_padding=2 is not read with folders"),
        ("sr --distill none --truth 0.3", "truth=0.3 is not read with distill='none'"),
        ("rl --dual-clip 5", "dual_clip=5.0 is not read with distill='kl'"),
        ("rl --method i --distill ppo", "distill='ppo' is not read with method='i'"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(
    options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anywidth.app.commands.train._train", pytest.fail)
    answer = command("train", *options.split(), "--out", tmp_path / "run")
    assert answer.code == 2
    assert answer.errors.startswith(f"anywidth: {said}")


@pytest.mark.parametrize(
    "options",
    [
        "--method i",
        "--method s --no-distill",
        "--rule random --truth 0",
        "sr --distill none --truth 0",
    ],
)
def test_what_a_recipe_brings_or_asks_for_nothing_is_no_mistake(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anywidth.app.commands.train._train", lambda *rest, **more: True)
    answer = command("train", *options.split(), "--no-report", "--out", tmp_path / "run")
    assert answer == (0, "", "")


@pytest.mark.parametrize("settings", [ClassificationSettings(), SuperResolutionSettings()])
def test_every_number_has_a_range(settings: AnySettings) -> None:
    # The scale is checked with the pictures, which say more about it.
    numbers = {
        field.name: field
        for field in dataclasses.fields(settings)
        if re.match("(tuple\\[)?(int|float)", str(field.type)) and field.name != "scale"
    }
    assert {name for name, field in numbers.items() if "range" not in field.metadata} == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--batch-size", "abc"), "--batch-size 'abc': expected a whole number"),
        (("train", "--epochs", "1.5"), "--epochs '1.5': expected a whole number"),
        (("train", "--epochs=1.5"), "--epochs '1.5': expected a whole number"),
        (("study", "--minutes", "soon"), "--minutes 'soon': expected a number"),
        (("spectrum",), "Missing argument 'RUN'. (see: anywidth spectrum --help)"),
        (("trian",), "No such command 'trian'. Did you mean 'train'? (see: anywidth --help)"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    answer = command(*arguments)
    assert answer == (2, "", f"anywidth: {said}\n")


def test_version_and_help() -> None:
    assert command("--version") == (0, f"anywidth {__version__}\n", "")
    assert "--version" in command("--help").output
    assert command() == command("--help")


def test_show_lists_the_values_a_field_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = command("train", "--show").output
    for allowed in ("us | s | i", "sandwich | random | min+random | max+random", "test | split",
                    "exact | moving", "auto | float32 | bfloat16", "above 0", "8, 16 or 32",
                    "1 or 2"):  # fmt: skip
        assert f"; {allowed}" in shown
    assert "; none | l1 | l2" in command("train", "sr", "--show").output


def test_a_resumed_run_may_skip_damaged_files_and_take_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ClassificationSettings] = []

    def train(settings: ClassificationSettings, folder: Path, is_new: bool) -> bool:
        seen.append(settings)
        return False

    monkeypatch.setattr("anywidth.app.commands.train._train", train)
    begun = ClassificationSettings(epochs=3, width=1.0, device="cpu")
    Run.create(tmp_path / "run", begun)
    options = ("--skip-corrupt", "--workers", "2")
    answer = command("train", "--resume", tmp_path / "run", *options)
    assert answer.code == 130
    assert seen == [dataclasses.replace(begun, skip_corrupt=True, workers=2)]
    go_on = f"anywidth train --resume {tmp_path / 'run'} --skip-corrupt=true --workers=2\n"
    assert answer.output == f"Stopped. Go on with: {go_on}"
    refused = command("train", "--resume", tmp_path / "run", "--skip-corrupt", "--low", "0.5")
    assert refused.code == 2
    assert "--workers and --skip-corrupt may change" in refused.errors
