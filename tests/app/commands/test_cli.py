"""The command as a whole: help, its width, its one line for every mistake."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_itself_with_an_example(name: str) -> None:
    _, heading, examples = succeed(name, "--help").output.partition("Example")
    assert heading
    assert f"anywidth {name}" in examples
    assert name in succeed("--help").output


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


QUICK = """
import sys
from anywidth.app import cli
sys.argv = ["anywidth", *sys.argv[1:]]
try:
    cli.main()
finally:
    print([name for name in ("torch", "numpy", "matplotlib") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("-h",), *((name, "-h") for name in COMMANDS), ("export", "--widht", "1")],
    ids=" ".join,
)
def test_help_and_wrong_options_do_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUICK, *arguments], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("anywidth ex", {"export"}), ("anywidth export --wid", {"--width", "--widths"})],
)
def test_the_shell_completes_commands_and_options(typed: str, expected: set[str]) -> None:
    words = typed.split()
    done = subprocess.run(
        [sys.executable, "-c", QUICK],
        capture_output=True,
        text=True,
        env=environment(
            _ANYWIDTH_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1)
        ),
    )
    *found, loaded = done.stdout.splitlines()
    assert (set(found), loaded) == (expected, "[]")


def test_a_shell_can_be_taught_to_complete() -> None:
    """Which shell runs the tests does not matter: `source_bash` names one."""
    done = subprocess.run(
        [sys.executable, "-c", QUICK],
        capture_output=True,
        text=True,
        env=environment(_ANYWIDTH_COMPLETE="source_bash"),
    )
    assert "complete_bash" in done.stdout
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
