"""Commands that the user is told to call can be copied."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anywidth.app.own_command import own_command


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "anywidth"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_program_on_the_path_has_its_name(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command("serve", Path("my runs/net.anywidth")) == (
        "anywidth serve 'my runs/net.anywidth'"
    )


def test_a_program_that_the_shell_would_not_find_has_its_path(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command("serve") == f"{program} serve"


def test_a_module_is_called_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/anywidth/__main__.py"])
    assert own_command("train", "--list") == "anywidth train --list"


@pytest.mark.parametrize(
    "name",
    [
        "a  b",
        "$x_1$",
        "it's",
        'a"b',
        "#1 %s {}",
        "-rf",
        "ünï 图 🙂",
        "two\nlines",
        "tab\t\\'",
        "\udcff",
    ],
    ids=ascii,
)
def test_any_folder_can_be_copied_to_a_shell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/anywidth/__main__.py"])
    told = own_command("spectrum", Path(name))
    assert "\n" not in told
    script = f"anywidth() {{ printf '%s\\0' \"$@\"; }}; {told}"
    read = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    command, folder, _ = read.split(b"\0")
    assert command == b"spectrum"
    assert Path(folder.decode(errors="surrogateescape")) == Path(name)
    assert not folder.startswith(b"-")
