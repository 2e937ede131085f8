"""The numbers of a training on Weights & Biases, beside metrics.csv and TensorBoard."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.files import read_bytes, write_atomically

logger = logging.getLogger(__name__)

PROJECT = "anywidth"
"""The project's name there, unless WANDB_PROJECT names another."""
_ID = "wandb-id.txt"


def check_wandb() -> None:
    """Refuse --wandb before anything is done, if its package is missing."""
    if importlib.util.find_spec("wandb") is None:
        raise AnywidthError("--wandb needs the package wandb: pip install 'anywidth[wandb]'")


class WandbLog:
    """A run on Weights & Biases, or with WANDB_MODE=offline a copy of it in the run's folder.

    A resumed run continues the same run there.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        check_wandb()
        import wandb

        path = folder / _ID
        if not path.exists():
            write_atomically(path, secrets.token_hex(6).encode())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.resolve().name,
                id=read_bytes(path).decode(),
                resume="allow",
                dir=folder,
                config=dict(settings),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # it has no common class of errors
            raise AnywidthError(
                f"--wandb: {error}; log in with `wandb login`, or record without a network with "
                "WANDB_MODE=offline"
            ) from error
        # Rows of a resumed run may repeat steps, which its own step counter would drop.
        self._run.define_metric("*", step_metric="step")

    def append(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._run.log({"step": step, **values})
        except Exception as error:  # a lost service is no reason to lose a training
            logger.warning("wandb: %s; metrics.csv has all rows", error)

    def close(self) -> None:
        self._run.finish()
