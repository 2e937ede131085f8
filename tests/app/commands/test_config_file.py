"""`anywidth train --config FILE`: settings from a file, with options on top."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, assert_refused, command, succeed

from anywidth.app.runs.settings import to_json
from anywidth.app.tasks.registry import recipe


def written(folder: Path, data: Any) -> Path:
    path = folder / "settings.json"
    path.write_text(json.dumps(data))
    return path


def shown(answer: Answer, field: str) -> str:
    found = re.search(rf"--{field}\s+(\S+)", answer.output)
    assert found, answer.output
    return found[1]


def test_all_settings_of_a_run_and_options_on_top(tmp_path: Path) -> None:
    data = to_json(recipe("sr_wdsr")) | {"epochs": 17, "seed": 5}
    answer = succeed("train", "--config", written(tmp_path, data), "--seed", "6", "--show")
    assert shown(answer, "epochs") == "17"
    assert shown(answer, "seed") == "6"
    assert shown(answer, "blocks") == str(data["blocks"])


def test_a_few_settings_change_a_recipe(tmp_path: Path) -> None:
    path = written(tmp_path, {"epochs": 17, "switches": [0.5, 1.0]})
    answer = succeed("train", "cifar10_mobilenet_v2", "--config", path, "--low", "0.4", "--show")
    assert shown(answer, "epochs") == "17"
    assert shown(answer, "switches") == "0.5,1.0"
    assert shown(answer, "low") == "0.4"
    assert shown(answer, "head-rate") == "0.1"  # the recipe's
    assert shown(succeed("train", "--config", path, "--show"), "data") == "bundled"


WHOLE = to_json(recipe("cifar10_mobilenet_v1"))


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        ({"epoch": 3}, (), ("'epoch'", "'epochs'")),
        ({"epochs": "many"}, (), ("epochs='many'",)),
        ({"epochs": 2.5}, (), ("epochs=2.5",)),
        ({"epochs": 0}, (), ("epochs 0",)),
        ({"task": "super_resolution", "epochs": 3}, (), ("super_resolution", "recipe")),
        (WHOLE, ("cifar10_mobilenet_v1",), ("recipe", "leave")),
        ({**WHOLE, "task": "translation"}, (), ("'translation'",)),
        ({k: v for k, v in WHOLE.items() if k != "width"}, (), ("'width'",)),
        ({**WHOLE, "version": 99}, (), ("99",)),
        ([1, 2], (), ("object",)),
    ],
)
def test_wrong_files_are_named_with_their_fields(
    data: Any, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = written(tmp_path, data)
    answer = command("train", *arguments, "--config", path, "--out", tmp_path / "run")
    assert_refused(answer, *words)
    assert not (tmp_path / "run").exists()


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert_refused(command("train", "--config", missing), str(missing))
    missing.write_text("{")
    assert_refused(command("train", "--config", missing), str(missing), "JSON")


def test_a_file_does_not_run_code_of_its_own(tmp_path: Path) -> None:
    """Someone's config.json is as little trusted as their run."""
    theirs = "tiny_networks:tiny"
    path = written(tmp_path, {**WHOLE, "model": theirs})
    assert_refused(command("train", "--config", path, "--show"), "--trust")
    for allowed in (("--trust",), ("--model", theirs)):
        answer = succeed("train", "--config", path, *allowed, "--show")
        assert shown(answer, "model") == theirs
