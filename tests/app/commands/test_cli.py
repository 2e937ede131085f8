"""The command as a whole: help, its width, its one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Answer, anywidth, assert_refused, command, environment, succeed
from typer.main import get_command

from anywidth._version import __version__
from anywidth.app.commands.app import app
from anywidth.app.showing.output import console
from anywidth.measuring import heartbeat

COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]


def test_a_pipe_is_not_taken_for_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console.print("a word " * 16)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_help_explains_itself_with_an_example() -> None:
    listed = succeed("--help").output
    for name in COMMANDS:
        _, heading, examples = succeed(name, "--help").output.partition("Example")
        assert heading, name
        assert f"anywidth {name}" in examples
        assert name in listed


def test_a_real_process_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    done = anywidth("spectrum", tmp_path)
    assert_refused(Answer(done.returncode, done.stdout, done.stderr), "anywidth: ", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--batch-size", "abc"), ("--batch-size", "'abc'")),
        (("train", "--epochs", "1.5"), ("--epochs", "'1.5'")),
        (("train", "--epochs=1.5"), ("--epochs", "'1.5'")),
        (("study", "--minutes", "soon"), ("--minutes", "'soon'")),
        (("study", "--seeds", "0"), ("--seeds", "'0'", "at least 1")),
        (("spectrum",), ("'RUN'", "anywidth spectrum --help")),
        (("trian",), ("'train'", "anywidth --help")),
    ],
)
def test_a_wrong_call_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    answer = command(*arguments)
    assert (answer.code, answer.output) == (2, "")
    (line,) = answer.errors.splitlines()
    for word in words:
        assert word in line


def test_version_and_help() -> None:
    assert command("--version") == (0, f"anywidth {__version__}\n", "")
    assert "--version" in command("--help").output
    assert command() == command("--help")


# Runs calls one after the other, and prints which slow packages they loaded.
QUICK = """
import json, sys
from anywidth.app import cli
for call in json.loads(sys.argv[1]):
    sys.argv = ["anywidth", *call]
    try:
        cli.main()
    except SystemExit:
        pass
print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules])
"""


def quick(*calls: tuple[str, ...], **changes: str) -> list[str]:
    """The lines of a new process, of which the last lists the slow packages it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", QUICK, json.dumps(calls or [()])],
        capture_output=True,
        text=True,
        env=environment(**changes),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_help_and_wrong_options_do_not_wait_for_torch() -> None:
    helps = ((name, "-h") for name in COMMANDS)
    *lines, loaded = quick(("--version",), ("-h",), *helps, ("export", "--widht", "1"))
    assert loaded == "[]"
    assert sum("Usage:" in line for line in lines) == 1 + len(COMMANDS)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("anywidth ex", {"export"}), ("anywidth export --wid", {"--width", "--widths"})],
)
def test_the_shell_completes_commands_and_options(typed: str, expected: set[str]) -> None:
    words = typed.split()
    *found, loaded = quick(
        _ANYWIDTH_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1)
    )
    assert (set(found), loaded) == (expected, "[]")


def test_a_shell_can_be_taught_to_complete() -> None:
    """Which shell runs the tests does not matter: `source_bash` names one."""
    assert "complete_bash" in " ".join(quick(_ANYWIDTH_COMPLETE="source_bash"))
    assert "--show-completion" in command("--help").output


@pytest.mark.parametrize(
    ("arguments", "close"),
    [
        (("predict", "--widht", "0.5"), "--width"),
        (("train", "--lerning-rate", "1"), "--learning-rate"),
        (("train", "--resum", "runs/x"), "--resume"),
        (("train", "--xyzzy", "1"), "--show"),
    ],
)
def test_an_unknown_option_names_the_closest_alone(arguments: tuple[str, ...], close: str) -> None:
    answer = command(*arguments)
    assert_refused(answer, arguments[1], close)
    assert answer.errors.count("--") == 2


def test_a_command_that_takes_long_is_never_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a command does, and also in a pipe."""
    monkeypatch.setattr(heartbeat, "SILENCE", 0.02)
    monkeypatch.setattr(heartbeat, "_TICK", 0.005)
    monkeypatch.setattr("anywidth.app.tasks.registry.all_recipes", lambda: time.sleep(0.2) or {})
    assert "anywidth train: still at work" in succeed("train", "--list").errors
