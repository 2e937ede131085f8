"""Settings survive JSON and text, and a mistake in either is named."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anywidth.app.runs.settings import Settings, describe, from_json, option, override, to_json
from anywidth.errors import AnywidthError


@dataclass(frozen=True)
class Recipe(Settings):
    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 2

    epochs: int = option(10, "passes over the training images")
    learning_rate: float = 0.5
    batch_size: int = 64
    nesterov: bool = True
    dataset: str = "bundled"
    widths: tuple[float, ...] = (0.25, 1.0)
    image_size: tuple[int, int] = (28, 28)
    limit: int | None = None
    rule: Literal["sandwich", "random"] = "sandwich"
    label: str | None = None
    schedule: str = option("cosine", "of the learning rate", earlier="linear")

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise AnywidthError(f"epochs={self.epochs}: at least 1 is needed")


finite = st.floats(allow_nan=False, allow_infinity=False)
recipes = st.builds(
    Recipe,
    epochs=st.integers(1, 10**12),
    learning_rate=finite,
    nesterov=st.booleans(),
    dataset=st.text(),
    widths=st.lists(finite, max_size=4).map(tuple),
    image_size=st.tuples(st.integers(), st.integers()),
    limit=st.none() | st.integers(),
    rule=st.sampled_from(["sandwich", "random"]),
    label=st.none() | st.text("abc xyz", min_size=1),
)


@given(recipes)
def test_json_round_trip_is_exact(recipe: Recipe) -> None:
    data = json.loads(json.dumps(to_json(recipe)))
    assert (data["version"], data["task"]) == (2, "classification")
    assert from_json(Recipe, data) == recipe


@given(recipes)
def test_described_values_are_what_override_takes(recipe: Recipe) -> None:
    rows = {row.name: row.value for row in describe(recipe)}
    assert override(replace(Recipe(), epochs=3), rows) == recipe


def test_describe_gives_values_and_help() -> None:
    rows = {row.name: row for row in describe(Recipe())}
    assert (rows["epochs"].value, rows["epochs"].help) == ("10", "passes over the training images")
    assert rows["widths"].value == "0.25,1.0"
    assert rows["limit"].value == "none"
    assert rows["rule"].allowed == "sandwich | random"
    assert rows["nesterov"].value == "true"


def test_override_parses_by_annotation() -> None:
    changed = override(
        Recipe(limit=5),
        {
            "epochs": "3",
            "learning-rate": "1e-3",
            "nesterov": "False",
            "widths": ".25, 0.5",
            "limit": "none",
            "rule": "random",
            "label": "none",
        },
    )
    assert changed == Recipe(
        epochs=3, learning_rate=1e-3, nesterov=False, widths=(0.25, 0.5), rule="random"
    )
    assert override(Recipe(), {"widths": ""}).widths == ()
    assert override(Recipe(), {"label": "7"}).label == "7"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("epochs", "three", "integer"),
        ("epochs", "2.5", "integer"),
        ("epochs", "none", "integer"),
        ("learning_rate", "nan", "finite"),
        ("nesterov", "perhaps", "boolean"),
        ("widths", "0.25,wide", "number"),
        ("widths", "0.25,", "number"),
        ("image_size", "28", "'28,28'"),
        ("limit", "many", "integer"),
        ("rule", "sandwhich", "'sandwich' or 'random'"),
    ],
)
def test_override_names_what_it_cannot_parse(name: str, text: str, expected: str) -> None:
    with pytest.raises(AnywidthError) as error:
        override(Recipe(), {name: text})
    assert str(error.value).startswith(f"--{name.replace('_', '-')} {text!r}: ")
    assert expected in str(error.value)


def test_unknown_names_get_a_suggestion_or_the_known_fields() -> None:
    with pytest.raises(AnywidthError, match="'batch_size'"):
        override(Recipe(), {"batchsize": "3"})
    with pytest.raises(AnywidthError, match="'epochs'"):
        from_json(Recipe, {**to_json(Recipe()), "epoch": 3})
    with pytest.raises(AnywidthError, match="image_size, limit"):
        override(Recipe(), {"xyzzy": "3"})


def test_settings_check_themselves_after_an_override() -> None:
    with pytest.raises(AnywidthError, match="epochs=0"):
        override(Recipe(), {"epochs": "0"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": "3"}, "epochs='3'"),
        ({"epochs": True}, "epochs=True"),
        ({"epochs": 3.0}, r"epochs=3\.0"),
        ({"nesterov": 1}, "nesterov=1"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"widths": 0.25}, r"widths=0\.25"),
        ({"image_size": [28]}, r"image_size=\[28\]"),
        ({"rule": "all"}, "'sandwich' or 'random'"),
        ({"version": 3}, "newer"),
        ({"version": "2"}, "version '2'"),
        ({"task": "super_resolution"}, "'super_resolution'"),
    ],
)
def test_from_json_names_a_wrong_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(AnywidthError, match=named):
        from_json(Recipe, {**to_json(Recipe()), **change})


@pytest.mark.parametrize("missing", ["version", "task", "widths"])
def test_from_json_names_a_missing_field(missing: str) -> None:
    data = to_json(Recipe())
    del data[missing]
    with pytest.raises(AnywidthError, match=f"'{missing}'"):
        from_json(Recipe, data)


def test_an_older_version_takes_the_defaults_of_later_fields() -> None:
    data = {**to_json(Recipe(epochs=7)), "version": 1}
    del data["label"]
    assert from_json(Recipe, data) == Recipe(epochs=7)


def test_an_older_version_keeps_what_was_done_before_a_field() -> None:
    data = {**to_json(Recipe(schedule="cosine")), "version": 1}
    assert from_json(Recipe, data).schedule == "cosine"
    del data["schedule"]
    assert from_json(Recipe, data).schedule == "linear"


def test_not_an_object() -> None:
    with pytest.raises(AnywidthError, match=r"\[1\]"):
        from_json(Recipe, [1])  # type: ignore[arg-type]


def test_a_value_of_the_wrong_type_is_not_written() -> None:
    with pytest.raises(AnywidthError, match=r"epochs=2\.5"):
        to_json(Recipe(epochs=2.5))  # type: ignore[arg-type]
    assert to_json(Recipe(widths=[0.5, 1]))["widths"] == [0.5, 1.0]  # type: ignore[arg-type]


# ---- limits --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited(Settings):
    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 1

    count: int = option(1, "of images", at_least=1)
    rate: float = option(0.1, "of learning", above=0)
    share: float = option(0.0, "of truth", at_least=0, at_most=1)
    momentum: float = option(0.9, "of SGD", at_least=0, below=1)
    limit: int | None = option(None, "of images", at_least=2)
    name: str = option("net", "of the network")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "--count 0: expected at least 1"),
        ("rate", 0.0, "--rate 0.0: expected above 0"),
        ("rate", -1.0, "--rate -1.0: expected above 0"),
        ("share", 1.5, "--share 1.5: expected at least 0, at most 1"),
        ("share", -0.5, "--share -0.5: expected at least 0, at most 1"),
        ("momentum", 1.0, "--momentum 1.0: expected at least 0, below 1"),
        ("limit", 1, "--limit 1: expected at least 2"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: object, message: str) -> None:
    settings = replace(Limited(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(AnywidthError) as error:
        settings.check()
    assert str(error.value) == message
    # A run that was begun before there was a limit can still be read.
    assert from_json(Limited, to_json(settings)) == settings


def test_numbers_at_the_limits_are_in_range() -> None:
    Limited().check()
    Limited(count=1, rate=1e-9, share=1.0, momentum=0.0, limit=2).check()
    assert [row.allowed for row in describe(Limited())] == [
        "at least 1", "above 0", "at least 0, at most 1", "at least 0, below 1", "at least 2", "",
    ]  # fmt: skip
