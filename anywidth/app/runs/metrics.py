"""Numbers logged in training: a CSV file that survives a kill, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anywidth.errors import AnywidthError
from anywidth.files import errors_that_name, read_bytes, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Number = int | float

_MEND = "restore it from a copy, or remove it, which loses only the training curves"

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows of numbers to a CSV file and, if asked, to TensorBoard.

        with MetricsLog(run.metrics_path, run.tensorboard_folder) as log:
            log.truncate_after(checkpoint.step)         # when resuming
            log.append(step, {"loss/1.0": 2.3, "loss/0.25": 2.5})

    A row is written as soon as it is appended, so a kill costs at most a part of the last line,
    which is dropped when the file is opened again and continued. A new name becomes a new column.
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise AnywidthError(
                "TensorBoard events need the package tensorboard: pip install tensorboard"
            )
        self.path = path
        self._tensorboard = tensorboard
        self._events: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._columns: list[str] = []
        self._last_step: int | None = None
        self.beside: Callable[[int, Mapping[str, Number]], None] | None = None
        """Called with every row too."""
        if path.exists():
            self._rewrite(read_metrics(path))

    def append(self, step: int, values: Mapping[str, Number]) -> None:
        """Add a row of Python numbers: reading a tensor would make the host wait for the device."""
        row: dict[str, Number] = {"step": step, **values}
        if self._last_step is not None and step < self._last_step:
            raise AnywidthError(
                f"{self.path} already has rows up to step {self._last_step}; call "
                f"truncate_after({step}) to continue from step {step}"
            )
        if not self.path.exists():
            self._rewrite([row])
        elif not row.keys() <= set(self._columns):
            self._rewrite([*read_metrics(self.path), row])
        else:
            with (
                errors_that_name(self.path),
                open(self.path, "a", encoding="utf-8", newline="") as file,
            ):
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
            self._last_step = step
        self._write_events(step, values)
        if self.beside is not None:
            self.beside(step, values)

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, so that a resumed run has the log of an unbroken run.

        Columns that only these rows used are removed too. TensorBoard hides its later events.
        """
        self.close()
        self._purge_step = step + 1
        if self.path.exists():
            self._rewrite([row for row in read_metrics(self.path) if row["step"] <= step])

    def close(self) -> None:
        """Write pending events; rows can still be added afterwards."""
        if self._events is not None:
            with contextlib.suppress(OSError):  # every row was flushed or has already failed
                self._events.close()
            self._events = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _rewrite(self, rows: list[dict[str, Number]]) -> None:
        """Replace the file by a new one, with the columns in order of first appearance."""
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        self._last_step = int(rows[-1]["step"]) if rows else None
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue().encode())

    def _write_events(self, step: int, values: Mapping[str, Number]) -> None:
        if self._tensorboard is None:
            return
        try:
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(self._tensorboard, purge_step=self._purge_step)
                self._purge_step = None
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        except OSError as error:
            logger.warning(
                "%s: cannot be written (%s); training continues without TensorBoard",
                self._tensorboard,
                error.strerror or error,
            )
            self._tensorboard = None
            self.close()


def read_metrics(path: str | Path) -> list[dict[str, Number]]:
    """The rows of a metrics file, without empty cells.

    An incomplete last line, from a kill, is left out.
    """
    path = Path(path)
    text = read_bytes(path).decode("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    try:
        lines = list(csv.reader(io.StringIO(whole)))
    except csv.Error as error:
        raise AnywidthError(f"{path}: not a metrics file; {_MEND}") from error
    if not lines:
        return []
    columns = lines[0]
    if columns[:1] != ["step"]:
        raise AnywidthError(
            f"{path}: its first column is {columns[:1]}; a metrics file starts with 'step'; {_MEND}"
        )
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(columns, cells, strict=True)
            row = {name: _number(cell) for name, cell in pairs if cell}
            if not isinstance(row.get("step"), int):
                raise ValueError("no step")
        except ValueError as error:
            raise AnywidthError(
                f"{path}: line {number} is damaged ({error}); remove that line to use the rest"
            ) from error
        rows.append(row)
    return rows


def _number(text: str) -> Number:
    try:
        return int(text)
    except ValueError:
        return float(text)


# ---- Weights & Biases ----------------------------------------------------------------------------


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
