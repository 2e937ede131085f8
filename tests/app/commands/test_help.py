"""Help that teaches: every command has examples, which name only options that exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import pytest
from command_line import succeed
from typer.main import get_command

from anywidth.app.commands.app import app
from anywidth.app.tasks.registry import all_recipes

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
FIELDS = {
    f"--{field.name.replace('_', '-')}"
    for recipe in all_recipes().values()
    for field in dataclasses.fields(recipe())
}
EXAMPLE = re.compile(r"^ +((?:torchrun .*)?anywidth [a-z]+ .*|anywidth [a-z]+)$", re.MULTILINE)


def examples(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "100")
    shown = succeed(*name.split(), "--help").output
    # Words that explain an example are set apart by spaces.
    return [re.split(r" {3,}", line.strip())[0] for line in EXAMPLE.findall(shown)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_is_set_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [line for line in examples(name, monkeypatch) if f"anywidth {name}" in line]
    assert own
    shown = succeed(name, "--help").output
    assert all(re.search(rf"^   {re.escape(line)}", shown, re.MULTILINE) for line in own)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_name_commands_and_options_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(name, monkeypatch)
    assert found
    for line in found:
        words = shlex.split(line)
        words = words[words.index("anywidth") + 1 :]
        options = {option for one in COMMANDS[words[0]].params for option in one.opts}
        if words[0] == "train":
            options |= FIELDS
            assert words[1:2] == [] or words[1].startswith("--") or words[1] in all_recipes()
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options, line


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_is_lost_as_markup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes `[words]` for a style, and prints nothing of it."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = re.sub(r"[\s│]+", " ", succeed(name, "--help").output)
    for one in COMMANDS[name].params:
        if one.help:
            assert re.sub(r"\s+", " ", one.help) in shown
