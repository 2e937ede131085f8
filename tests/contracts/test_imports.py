"""The library never imports the application, rooms import one way, and `import anywidth` is light.

Rooms are folders. Each may import from the rooms before it in these lists, and from the files
beside the rooms, which everything uses.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "anywidth"

LIBRARY = ["planning", "models", "slimming", "translating", "training", "measuring", "searching",
           "deploying"]  # fmt: skip
APPLICATION = ["data", "runs", "showing", "tasks", "studies", "commands"]
ROOMS = [*LIBRARY, *(f"app/{name}" for name in APPLICATION), "app/cli.py"]

HEAVY = ("torchvision", "matplotlib", "typer", "rich", "safetensors", "tensorboard", "PIL", "timm",
         "transformers", "triton")  # fmt: skip


def room_of(path: Path) -> str | None:
    """The room that a file lies in; None for the files beside the rooms."""
    inside = path.relative_to(PACKAGE).as_posix()
    return next((room for room in ROOMS if inside == room or inside.startswith(f"{room}/")), None)


def files_of(module: str) -> list[Path]:
    """What a dotted name may stand for: a file, or a folder."""
    path = ROOT / Path(*module.split("."))
    return [found for found in (path.with_suffix(".py"), path / "__init__.py") if found.exists()]


def imported_files(path: Path) -> set[Path]:
    """Files that a file imports, also inside functions; for type checking alone does not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    mine = {name for name in names if name.startswith("anywidth.")}
    return {found for name in mine for found in files_of(name)}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_folder_is_a_room() -> None:
    lost = {
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        if room_of(path) is None and path.parent not in (PACKAGE, PACKAGE / "app")
    }
    assert not lost, "put the folder into LIBRARY or APPLICATION where its imports belong"


def test_rooms_import_one_way() -> None:
    place = {room: number for number, room in enumerate(ROOMS)}
    backward = [
        f"{path.relative_to(PACKAGE)} imports {imported.relative_to(PACKAGE)}"
        for path in sources()
        for imported in sorted(imported_files(path))
        if (mine := room_of(path)) and (other := room_of(imported)) and place[other] > place[mine]
    ]
    assert not backward


def test_files_beside_the_rooms_import_no_room() -> None:
    may = {PACKAGE / name for name in ("__init__.py", "__main__.py", "interface.py")}
    library = [
        f"{path.relative_to(PACKAGE)} imports {imported.relative_to(PACKAGE)}"
        for path in set(PACKAGE.glob("*.py")) - may
        for imported in imported_files(path)
        if room_of(imported)
    ]
    assert not library


def test_few_files_lie_beside_the_rooms() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 10


def test_one_file_name_means_one_thing() -> None:
    """Tasks hold the same files each; other files share no name."""
    names: dict[str, list[Path]] = {}
    for path in sources():
        if path.name != "__init__.py" and PACKAGE / "app/tasks" not in path.parents:
            names.setdefault(path.name, []).append(path.relative_to(PACKAGE))
    assert not {name: paths for name, paths in names.items() if len(paths) > 1}


def test_importing_needs_nothing_and_the_first_name_torch_alone() -> None:
    quick = "import sys, anywidth; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", quick]) == b"False\n"
    loaded = f"print([m for m in {HEAVY!r} if m in sys.modules])"
    code = f"import sys, anywidth; getattr(anywidth, '__all__'); {loaded}"
    before = code.replace("anywidth", "torch")
    with_library, torch_alone = (
        subprocess.run([sys.executable, "-c", line], capture_output=True, check=True).stdout
        for line in (code, before)
    )
    assert with_library == torch_alone
    assert b"torchvision" not in with_library


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450
