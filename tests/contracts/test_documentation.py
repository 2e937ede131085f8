"""The documentation is true of the code: its links, paths, commands and first example."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from command_line import command

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FOLDERS = "anywidth|benchmarks|docs|examples|scripts|tests"


def commands(page: Path) -> list[str]:
    """The command lines of a page, from its fenced blocks and from the spans in its sentences."""
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    parts = [part for line in (*lines, *spans) for part in re.split("&&|#", line)]
    return [" ".join(part.split()) for part in parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    headings = [
        re.sub(r"[^\w -]", "", line.lower()) for line in re.findall(r"^#+ (.*)", text, re.M)
    ]
    anchors = {heading.replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@functools.cache
def help_of(name: str) -> str:
    return command(name, "--help").output


def test_commands_and_their_options_exist() -> None:
    fields = "".join(command("train", recipe, "--show").output for recipe in ("", "sr", "rl"))
    unknown = set()
    for line in (line for page in PAGES for line in commands(page)):
        if found := re.match(r"(?:torchrun .* -m )?anywidth (\w+)(.*)", line):
            name, rest = found.groups()
            known = help_of(name) + (fields if name == "train" else "")
        elif found := re.match(r"python3? (?:-m )?benchmarks[./](\w+)(.*)", line):
            name, rest = found.groups()
            known = (ROOT / "benchmarks" / f"{name}.py").read_text()
        else:
            continue
        assert known, line
        for option in re.findall(r"(?<= )--[a-z0-9-]+", rest):
            plain = option.replace("--no-", "--")
            if not re.search(rf"(?<![\w-]){plain}(?![\w-])", known):
                unknown.add(line)
    assert unknown == set()


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batch = (torch.randn(4, 3, 64, 64), torch.arange(4))
    names: dict[str, object] = {"loader": [batch], "calibration_loader": [batch]}
    exec(compile(example, "README.md", "exec"), names)
    small, logits = names["small"], names["logits"]
    assert isinstance(small, torch.nn.Module)
    assert isinstance(logits, torch.Tensor)
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(batch[0]), logits, rtol=1e-3, atol=1e-3)
    assert (tmp_path / "network.safetensors").exists()
