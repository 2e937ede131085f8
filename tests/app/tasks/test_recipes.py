"""Ready settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import anywidth as aw
from anywidth.app.runs.settings import from_json, override, to_json
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.registry import all_recipes, recipe
from anywidth.app.tasks.task_settings import TaskSettings

Recipe = Callable[[], TaskSettings]
RECIPES = list(all_recipes().values())

NAMES = {
    "fashion_mnist_demo",
    "cifar10_mobilenet_v1",
    "cifar10_mobilenet_v2",
    "imagenet_us_mobilenet_v1",
    "imagenet_us_mobilenet_v2",
    "imagenet_us_resnet50",
}


def test_no_recipe_is_missing() -> None:
    assert {found.__name__ for found in RECIPES} >= NAMES


@pytest.mark.parametrize("build", RECIPES, ids=lambda build: build.__name__)
def test_each_is_a_configuration_that_survives_a_file(build: Recipe) -> None:
    settings = build()
    assert recipe(build.__name__) == settings
    settings.check()
    assert from_json(type(settings), to_json(settings)) == settings
    assert override(settings, {"seed": "5"}).seed == 5
    if isinstance(settings, ClassificationSettings):
        assert settings.sampling().rule == "sandwich"
        assert all(settings.low <= width <= settings.high for width in settings.switches)


@pytest.mark.parametrize("name", ["imagenet_us_mobilenet_v1", "imagenet_us_mobilenet_v2"])
def test_imagenet_has_the_settings_of_the_paper(name: str) -> None:
    settings = recipe(name)
    assert isinstance(settings, ClassificationSettings)
    assert (settings.data, settings.image_size) == ("folder", 224)
    assert (settings.epochs, settings.batch_size) == (250, 1024)
    assert (settings.learning_rate, settings.warmup_epochs) == (0.5, 0)
    assert (settings.momentum, settings.weight_decay) == (0.9, 1e-4)
    assert (settings.rule, settings.widths_per_step) == ("sandwich", 4)
    assert (settings.nonuniform, settings.lattice) == (False, None)
    assert (settings.distill, settings.temperature, settings.truth) == (True, 1.0, 0.0)
    assert (settings.method, settings.high, settings.divisor) == ("us", 1.0, 8)
    assert settings.low == (0.25 if name.endswith("v1") else 0.35)
    assert settings.model == name.removeprefix("imagenet_us_")


def test_only_some_recipes_mix_true_labels_into_soft_ones() -> None:
    settings = {build.__name__: build() for build in RECIPES}
    shares = {
        name: one.truth
        for name, one in settings.items()
        if isinstance(one, ClassificationSettings) and one.truth
    }
    assert shares == {"fashion_mnist_demo": 0.5, "cifar10_mobilenet_v2": 0.5}


def test_the_default_needs_no_download() -> None:
    assert "Fashion-MNIST" in recipe("fashion_mnist_demo").trained_on


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(aw.AnywidthError, match="'imagenet'"):
        recipe("imagenet")
