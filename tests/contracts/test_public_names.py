"""The public names, and how they are called, are a contract."""

from __future__ import annotations

import inspect

import pytest

import anywidth as aw

SIGNATURES = {
    "plan": ["model", "example_input"],
    "slimmable": ["model", "plan", "widths", "example_input", "average_outputs", "verified",
                  "strict"],
    "set_width": ["model", "width"],
    "at_width": ["model", "width"],
    "extract": ["model", "width", "fold"],
    "macs": ["model", "width"],
    "parameter_count": ["model", "width"],
    "latency": ["model", "width", "batch_size", "extracted", "fold", "repeats", "warmup",
                "input_shape"],
    "plan_of": ["model"],
    "replica": ["model"],
    "save": ["model", "path"],
    "load": ["model", "path"],
    "WidthRange": ["low", "high", "divisor"],
    "ChannelConfig": ["channels"],
}  # fmt: skip

PLAN_METHODS = ["check", "copy", "distinct_widths", "elastic", "elastic_layers", "fraction",
                "from_json", "group", "group_of", "group_read_by", "lattice", "macs", "only",
                "pin", "resolve", "set_divisor", "tie", "to_json"]  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = list(inspect.signature(getattr(aw, name)).parameters)
    assert parameters[: len(SIGNATURES[name])] == SIGNATURES[name]


def test_defaults() -> None:
    assert aw.WidthRange() == aw.WidthRange(0.25, 1.0, divisor=8)
    assert inspect.signature(aw.extract).parameters["fold"].default is False
    assert issubclass(aw.AnywidthError, ValueError)


def test_everything_listed_exists_and_is_documented() -> None:
    assert aw.__all__ == sorted(aw.__all__)
    for name in aw.__all__:
        thing = getattr(aw, name)
        assert name == "__version__" or inspect.getdoc(thing), name


def test_plan_methods() -> None:
    public = {name for name in vars(aw.Plan) if not name.startswith("_")}
    assert set(PLAN_METHODS) <= public


def test_models() -> None:
    for name in ("mobilenet_v1", "mobilenet_v2"):
        parameters = inspect.signature(getattr(aw.models, name)).parameters
        assert list(parameters)[:2] == ["num_classes", "in_channels"]
