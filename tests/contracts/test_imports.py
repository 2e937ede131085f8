"""Imports only point up the table in docs/architecture.md, and `import anywidth` stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anywidth"

HEAVY = ("torchvision", "matplotlib", "typer", "rich", "safetensors", "tensorboard", "PIL", "timm",
         "triton")  # fmt: skip


def rooms() -> list[str]:
    """The files and folders of the package in the order of the table, from its top."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## The rooms")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [name.removesuffix(".py").rstrip("/") for name in names]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms a file imports, also inside functions; for type checking alone does not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            parts = node.module.split(".")
            if parts[0] == "anywidth":
                found |= {parts[1]} if len(parts) > 1 else {name.name for name in node.names}
        elif isinstance(node, ast.Import):
            names = [name.name.split(".") for name in node.names]
            found |= {name[1] for name in names if name[0] == "anywidth" and len(name) > 1}
    return found - {room_of(path)}


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"
            or path.parent != PACKAGE]  # fmt: skip


def test_every_file_is_in_the_table() -> None:
    existing = {room_of(path) for path in sources()}
    listed = rooms()
    assert len(listed) == len(set(listed))
    assert existing - set(listed) == set(), "add these to the table in docs/architecture.md"
    assert set(listed) - existing == set(), "these are in docs/architecture.md and gone"


def test_imports_point_up() -> None:
    place = {name: number for number, name in enumerate(rooms())}
    downward = [
        f"{path.relative_to(ROOT)} imports {room}"
        for path in sources()
        for room in sorted(imported_rooms(path) & place.keys())
        if place[room] > place[room_of(path)]
    ]
    assert not downward


def test_importing_needs_torch_alone() -> None:
    code = f"import sys, anywidth; print([m for m in {HEAVY!r} if m in sys.modules])"
    before = code.replace("anywidth", "torch")
    with_library, torch_alone = (
        subprocess.run([sys.executable, "-c", line], capture_output=True, check=True).stdout
        for line in (code, before)
    )
    assert with_library == torch_alone
    assert b"torchvision" not in with_library


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert not {path.name: n for path, n in lengths.items() if n > 500}
