"""A configuration survives JSON and text, and a mistake in either is named."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anywidth.app.runs.settings import (
    Range,
    about,
    check_ranges,
    describe,
    from_json,
    override,
    to_json,
)
from anywidth.errors import AnywidthError


@dataclass(frozen=True)
class Recipe:
    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 2

    epochs: int = field(default=10, metadata={"help": "passes over the training images"})
    learning_rate: float = 0.5
    batch_size: int = 64
    nesterov: bool = True
    dataset: str = "bundled"
    widths: tuple[float, ...] = (0.25, 1.0)
    image_size: tuple[int, int] = (28, 28)
    limit: int | None = None
    rule: Literal["sandwich", "random"] = "sandwich"
    label: str | None = None

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
    assert rows["epochs"] == ("epochs", "10", "passes over the training images", "")
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
            "widths": "0.25, 0.5",
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
    ("name", "text"),
    [
        ("epochs", "three"),
        ("epochs", "2.5"),
        ("epochs", "none"),
        ("learning_rate", "nan"),
        ("nesterov", "1"),
        ("widths", "0.25,wide"),
        ("widths", "0.25,"),
        ("image_size", "28"),
        ("limit", "many"),
        ("rule", "sandwhich"),
    ],
)
def test_override_names_what_it_cannot_parse(name: str, text: str) -> None:
    with pytest.raises(AnywidthError) as error:
        override(Recipe(), {name: text})
    assert name in str(error.value)
    assert text in str(error.value)


def test_unknown_names_get_a_suggestion_and_the_known_fields() -> None:
    with pytest.raises(AnywidthError, match="'batch_size'"):
        override(Recipe(), {"batchsize": "3"})
    with pytest.raises(AnywidthError, match="'epochs'"):
        from_json(Recipe, {**to_json(Recipe()), "epoch": 3})


def test_the_configuration_checks_itself_after_an_override() -> None:
    with pytest.raises(AnywidthError, match="epochs"):
        override(Recipe(), {"epochs": "0"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": "3"}, "epochs"),
        ({"epochs": True}, "True"),
        ({"epochs": 3.0}, "3.0"),
        ({"nesterov": 1}, "nesterov"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"widths": 0.25}, "widths"),
        ({"image_size": [28]}, "image_size"),
        ({"rule": "all"}, "sandwich"),
        ({"version": 3}, "newer"),
        ({"version": "2"}, "'2'"),
        ({"task": "super_resolution"}, "super_resolution"),
    ],
)
def test_from_json_names_a_wrong_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AnywidthError) as error:
        from_json(Recipe, {**to_json(Recipe()), **change})
    assert message in str(error.value)


@pytest.mark.parametrize("missing", ["version", "task", "widths"])
def test_from_json_names_a_missing_field(missing: str) -> None:
    data = to_json(Recipe())
    del data[missing]
    with pytest.raises(AnywidthError, match=missing):
        from_json(Recipe, data)


def test_an_older_version_takes_the_defaults_of_later_fields() -> None:
    data = {**to_json(Recipe(epochs=7)), "version": 1}
    del data["label"]
    assert from_json(Recipe, data) == Recipe(epochs=7)


def test_not_an_object() -> None:
    with pytest.raises(AnywidthError, match=r"\[1\]"):
        from_json(Recipe, [1])  # type: ignore[arg-type]


def test_a_value_of_the_wrong_type_is_not_written() -> None:
    with pytest.raises(AnywidthError, match="epochs"):
        to_json(Recipe(epochs=2.5))  # type: ignore[arg-type]
    assert to_json(Recipe(widths=[0.5, 1]))["widths"] == [0.5, 1.0]  # type: ignore[arg-type]


def test_a_class_that_cannot_be_stored_is_refused() -> None:
    @dataclass(frozen=True)
    class Nested:
        task: ClassVar[str] = "x"
        version: ClassVar[int] = 1
        options: dict[str, int] = field(default_factory=dict)

    @dataclass(frozen=True)
    class Unnamed:
        epochs: int = 1

    with pytest.raises(AnywidthError, match="options"):
        to_json(Nested())
    with pytest.raises(AnywidthError, match="configuration"):
        to_json(Unnamed())  # type: ignore[arg-type]


# ---- ranges --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited:
    task: ClassVar[str] = "classification"
    version: ClassVar[int] = 1

    count: int = field(default=1, metadata=about("of images", at_least=1))
    rate: float = field(default=0.1, metadata=about("of learning", above=0))
    share: float = field(default=0.0, metadata=about("of truth", at_least=0, at_most=1))
    momentum: float = field(default=0.9, metadata=about("of SGD", at_least=0, below=1))
    widths: tuple[float, ...] = field(
        default=(0.5, 1.0), metadata=about("trained", above=0, at_most=1)
    )
    limit: int | None = field(default=None, metadata=about("of images", at_least=2))
    name: str = field(default="net", metadata=about("of the network"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count=0: expected at least 1"),
        ("rate", 0.0, "rate=0.0: expected a number above 0"),
        ("rate", -1.0, "rate=-1.0: expected a number above 0"),
        ("share", 1.5, "share=1.5: expected a share from 0 to 1"),
        ("share", -0.5, "share=-0.5: expected a share from 0 to 1"),
        ("momentum", 1.0, "momentum=1.0: expected a share from 0 to below 1"),
        ("widths", (0.5, 2.0), "widths=(0.5, 2.0): expected numbers in (0, 1]"),
        ("widths", (0.0,), "widths=(0.0,): expected numbers in (0, 1]"),
        ("limit", 1, "limit=1: expected at least 2"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: object, message: str) -> None:
    settings = replace(Limited(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(AnywidthError) as error:
        check_ranges(settings)
    assert str(error.value) == message
    # A run that was begun before there was a limit can still be read.
    assert from_json(Limited, to_json(settings)) == settings


def test_numbers_at_the_limits_are_in_range() -> None:
    check_ranges(Limited())
    check_ranges(Limited(count=1, rate=1e-9, share=1.0, momentum=0.0, widths=(1.0,), limit=2))
    check_ranges(Limited(widths=()))
    assert [row.allowed for row in describe(Limited())] == [
        "at least 1", "above 0", "from 0 to 1", "from 0 to below 1", "in (0, 1]", "at least 2", "",
    ]  # fmt: skip
    assert 0.5 in Range(above=0, below=1)
    assert about("text") == {"help": "text"}
