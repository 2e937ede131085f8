"""The origin of a number: versions, commit and device."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

import anywidth
from anywidth._version import __version__
from anywidth.distributed import device_name


def provenance(device: torch.device) -> dict[str, str]:
    """Versions, commit and device of this process."""
    return {
        "anywidth": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
    }


def commit() -> str:
    """The commit of the running code, marked if it has changes; `unknown` outside a clone."""
    root = Path(anywidth.__file__).parents[1]
    if _git(root, "rev-parse", "--show-toplevel") != str(root.resolve()):
        return "unknown"  # installed, perhaps inside another project's repository
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "anywidth")
    return _git(root, "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
