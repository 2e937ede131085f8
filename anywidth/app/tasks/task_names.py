"""The tasks by name, and the command of each; light, because every help text needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

TASKS = ("classification", "super_resolution", "reinforcement")
"""The folders beside this file, one per task; `task.py` in it defines `TASK`."""


def command_of(task: str) -> Callable[..., None]:
    """The command that a finished run of a task is for, such as `predict`."""
    found: Callable[..., None] = importlib.import_module(
        f"anywidth.app.tasks.{task}.command"
    ).COMMAND
    return found
