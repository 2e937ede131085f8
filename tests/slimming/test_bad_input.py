"""Bad input: a clear error that names what was given and what to do; the model as it was."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import convert
from torch import Tensor, nn

import anywidth as aw
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
    with pytest.raises(aw.AnywidthError, match=r"model\.module"):
        aw.set_width(nn.DataParallel(model), 0.5)


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
