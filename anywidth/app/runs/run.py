"""The folder of a run: settings, checkpoints that survive a kill, and the finished network.

    RUN/config.json                 the settings, with their version
    RUN/data.json                   which data it is trained with
    RUN/checkpoints/                see `anywidth.app.runs.checkpoints`
    RUN/model.safetensors           the finished network,
    RUN/statistics.safetensors      its batch-norm statistics,
    RUN/finished.json               and the mark that both are complete
    RUN/metrics.csv, tensorboard/, plots/

Only one process at a time may train a run: creating it or opening it for writing locks it as long
as the `Run` exists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anywidth.json_values as values
from anywidth.app.own_command import own_command
from anywidth.app.runs.checkpoints import (
    LAYOUT_VERSION,
    Checkpoint,
    Checkpoints,
    Metadata,
    Tensors,
    part_file,
)
from anywidth.app.runs.folder_lock import FolderLock, lock_folder
from anywidth.app.runs.settings import Settings, SettingsType, from_json, to_json
from anywidth.errors import AnywidthError, errors_about, few_of
from anywidth.files import (
    encode_tensors,
    is_leftover,
    load_tensors,
    make_folder,
    read_json,
    remove_leftovers,
    save_tensors,
    sync_folder,
    write_json,
    write_together,
)

MEND = "restore it from a copy, or train again with another --out"
"""The fix for a damaged file of a run."""

_FINISHED = "finished.json"
# The files that commands write into the folder of a finished run.
_RESULTS = (
    *("model.safetensors", "statistics.safetensors"),
    *("spectrum.json", "spectrum.csv", "report.html", "metrics.csv"),
)
_FINISHED_FIELDS = values.record(
    {
        "version": values.whole(LAYOUT_VERSION, LAYOUT_VERSION),
        "state": values.mapped(values.anything),
        "sha256": values.optional(values.text),
        "settings": values.optional(values.mapped(values.anything)),
    },
    {"sha256": None, "settings": None},  # runs of older versions lack them
)
# Settings that may change after training, because answers do not depend on them.
_CIRCUMSTANCES = ("version", "device", "workers", "threads", "skip_corrupt")
_DATA = "data.json"
# The parts of every finished network.
_FINAL_PARTS = ("model", "statistics")
# Before the names of the model's buffers in the file of the statistics.
_FULL_WIDTH = "full/"


class Run:
    """The folder of a run, from `Run.create` or `Run.open`."""

    is_kept = True
    """Whether there is a folder; a dry run has none."""

    def __init__(self, folder: Path, settings_data: dict[str, Any], writing: bool) -> None:
        self.folder = folder
        self.settings_data = settings_data
        self.metrics_path = folder / "metrics.csv"
        self.tensorboard_folder = folder / "tensorboard"
        self.plots_folder = folder / "plots"
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self.uses_wandb = False
        self._writing = writing
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, folder: str | Path, settings: Settings) -> Run:
        """Start a run in a new or empty folder; check and write its settings."""
        settings.check()
        folder = Path(folder)
        data = to_json(settings)
        make_folder(folder)
        lock = lock_folder(folder)
        check_free(folder)
        remove_leftovers(folder)
        write_json(folder / "config.json", data)
        sync_folder(folder.parent)
        run = cls(folder, data, writing=True)
        run._lock = lock
        return run

    @classmethod
    def open(cls, folder: str | Path, *, writing: bool = False) -> Run:
        """Open an existing run.

        `writing` allows saving and removes temporary files of killed processes. Only one process
        may use it (with several ranks, rank 0).
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise AnywidthError(f"{folder} is not a run: there is no such folder")
        if not (folder / "config.json").is_file():
            raise AnywidthError(
                f"{folder} is not a run: config.json is missing; start one with: "
                f"{own_command('train', '--out', folder)}"
            )
        run = cls(folder, _read_own(folder / "config.json"), writing)
        if writing:
            check_writable(folder)
            run._lock = lock_folder(folder)
            for place in (folder, folder / "checkpoints", run.plots_folder):
                remove_leftovers(place)
        return run

    def remove_leftovers(self) -> None:
        """Remove what a killed calibration, spectrum or report left; the caller has the lock.

        Files that others write into the folder without it, such as exported networks, stay.
        """
        remove_leftovers(self.folder, _RESULTS)
        remove_leftovers(self.plots_folder)

    def read_settings(self, kind: type[SettingsType]) -> SettingsType:
        """The settings in config.json; errors name the file."""
        path = self.folder / "config.json"
        with errors_about(path):
            found = from_json(kind, self.settings_data)
        # If they were edited after training, answers would be of another network.
        trained = self._read_finished()["settings"] if self.finished else None
        for name, value in (trained or {}).items():
            is_free = name in _CIRCUMSTANCES or name.endswith("_dir")
            now = self.settings_data.get(name, value)
            if not is_free and now != value:
                raise AnywidthError(
                    f"{path}: {name} is {now!r}, but the run was trained with {value!r}; put that "
                    "back, or train a new run"
                )
        return found

    @classmethod
    def open_finished(cls, folder: str | Path, *, writing: bool = False) -> Run:
        """Open a run whose training is finished.

        Nothing is removed, because another process may be writing: a training or a calibration.
        """
        run = cls.open(folder)
        run._writing = writing
        if not run.finished:
            raise AnywidthError(
                f"{run.folder} has not finished training; continue with: "
                f"{own_command('train', '--resume', run.folder)}"
            )
        return run

    def keep_data(self, facts: Mapping[str, Any]) -> None:
        """Record the data that this run is trained with; refuse other data than before."""
        self.check_data(facts)
        path = self.folder / _DATA
        if self._writing and not path.exists():
            write_json(path, facts)

    def check_data(self, facts: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> None:
        """Refuse data that this run was not trained with, by facts such as its classes.

        `known` are facts of the run's own data: runs of older versions have no record.
        """
        path = self.folder / _DATA
        recorded = _read_own(path) if path.exists() else {}
        for name, value in {**(known or {}), **recorded}.items():
            if name in facts and facts[name] != value:
                raise AnywidthError(
                    f"{self.folder} was trained with other data: {name} {_short(value)}, but this "
                    f"data has {_short(facts[name])}; give the run's own data with --data-dir, or "
                    "train a new run"
                )

    @property
    def finished(self) -> bool:
        """Whether training is finished and `save_final` is complete."""
        return (self.folder / _FINISHED).is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether training has begun, and left a checkpoint."""
        return bool(self._checkpoints.folders())

    def save_checkpoint(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Metadata] | None = None,
    ) -> Path:
        """Write the state after `step` steps, a file per part; the newest two stay.

        `state` is JSON data such as counters, and `metadata` text for the files of the parts.
        """
        self._check_writing()
        return self._checkpoints.save(step, tensors, state, metadata or {})

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint; None if none was ever saved."""
        return self._checkpoints.load()

    def save_final(
        self,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Metadata] | None = None,
    ) -> None:
        """Write parts of the finished network ("model", "statistics") and mark the run finished.

        The run counts as unfinished until the last of them is on the disk.
        """
        self._check_writing()
        facts = {
            "state": state,
            "sha256": values.checksum_of(state),
            "settings": self.settings_data,
        }
        finished = self.folder / _FINISHED
        if finished.exists():
            finished.unlink()
            sync_folder(self.folder)
        for part, found in tensors.items():
            save_tensors(self.folder / part_file(part), found, (metadata or {}).get(part))
        write_json(finished, {"version": LAYOUT_VERSION, **facts})

    def save_statistics(
        self, tensors: Tensors, metadata: Metadata | None = None, *, model: Tensors | None = None
    ) -> None:
        """Replace the batch-norm statistics of the finished network, after calibrating more widths.

        `model` is the `state_dict`, if the full width was calibrated too, which changes its
        buffers. Everything takes effect with one rename: the file of the statistics contains the
        changed buffers, which count more than those in the model's file.
        """
        self._check_writing()
        if not self.finished:
            raise AnywidthError(
                f"{self.folder} is not finished; finish its training first: "
                f"{own_command('train', '--resume', self.folder)}"
            )
        statistics, network = (self.folder / part_file(part) for part in _FINAL_PARTS[::-1])
        if model is None:
            model = self.model_tensors()  # a killed calibration may have left its buffers here
        before = self.load_part("model")[0]
        changed = {
            f"{_FULL_WIDTH}{name}": tensor
            for name, tensor in model.items()
            if name in before and not torch.equal(tensor.cpu(), before[name])
        }
        write_together(
            {
                statistics: encode_tensors({**tensors, **changed}, metadata, statistics),
                network: encode_tensors(model, None, network),
            }
        )

    def load_part(self, part: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of a part, of the finished network or the newest checkpoint."""
        if self.finished:
            path = self.folder / part_file(part)
            if path.is_file() or part in _FINAL_PARTS:
                return self._load_final(path)
            parts = sorted(file.stem for file in self.folder.glob("*.safetensors"))
        else:
            checkpoint = self._newest()
            if part in checkpoint.tensors:
                return checkpoint.tensors[part], checkpoint.metadata[part]
            parts = sorted(checkpoint.tensors)
        raise AnywidthError(
            f"{self.folder} has no part {part!r}: expected one of {', '.join(parts)}"
        )

    def model_tensors(self) -> dict[str, Tensor]:
        """The `state_dict` of the finished network, or of the newest checkpoint."""
        found = self.load_part("model")[0]
        if self.finished and (self.folder / part_file("statistics")).is_file():
            statistics = self.load_part("statistics")[0]
            changed = {name: statistics.get(_FULL_WIDTH + name) for name in found}
            found |= {name: tensor for name, tensor in changed.items() if tensor is not None}
        return found

    def state(self) -> dict[str, Any]:
        """The JSON data saved with the finished network, or with the newest checkpoint."""
        if not self.finished:
            return self._newest().state
        found, path = self._read_finished(), self.folder / _FINISHED
        if found["sha256"] not in (None, values.checksum_of(found["state"])):
            raise AnywidthError(f"{path}: its content does not match its checksum; {MEND}")
        state: dict[str, Any] = found["state"]
        return state

    def _read_finished(self) -> dict[str, Any]:
        path = self.folder / _FINISHED
        data = _read_own(path)
        with errors_about(path, MEND):
            return _FINISHED_FIELDS(data, "")

    def read_state(self, fields: Mapping[str, values.Reader[Any]]) -> dict[str, Any]:
        """Fields of the state, read by a schema; the error names the file."""
        state = self.state()
        with errors_about(self.folder / _FINISHED, MEND):
            return values.record(fields)(
                {name: state[name] for name in fields if name in state}, "state"
            )

    def _load_final(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """A file of the finished network; if it is damaged, the error names the fix."""
        try:
            return load_tensors(path)
        except AnywidthError as error:
            if isinstance(error.__cause__, PermissionError):
                raise  # the file may be intact
            problem = str(error) if path.exists() else f"{path} is missing"
            mend = MEND
            if self._checkpoints.folders():
                away = "" if path.is_file() or not path.exists() else f"move {path} away, "
                mend = (
                    f"restore it from a copy, or make it again from the last checkpoint: {away}"
                    f"remove {self.folder / _FINISHED}, then: "
                    f"{own_command('train', '--resume', self.folder)}"
                )
            raise AnywidthError(f"{problem}: the finished run is damaged; {mend}") from error

    def _newest(self) -> Checkpoint:
        checkpoint = self.load_checkpoint()
        if checkpoint is None:
            raise AnywidthError(
                f"{self.folder} has no checkpoint yet; train it: "
                f"{own_command('train', '--resume', self.folder)}"
            )
        return checkpoint

    def _check_writing(self) -> None:
        if not self._writing:
            raise AnywidthError(
                f"{self.folder} was opened for reading; to save, use "
                f"Run.open({str(self.folder)!r}, writing=True)"
            )


def check_free(folder: Path) -> None:
    """Refuse a folder for a new run that has files in it."""
    if folder.is_dir() and not all(is_leftover(path) for path in folder.iterdir()):
        raise AnywidthError(
            f"{folder} is not empty; continue the run in it with --resume {folder}, or choose "
            "another folder with --out"
        )


def check_writable(folder: Path) -> None:
    """Refuse a read-only folder before the work, not after it."""
    for place in (folder, folder / "plots"):
        if place.exists() and not os.access(place, os.W_OK | os.X_OK):
            raise AnywidthError(
                f"{place} is read-only, but the results are written there: copy the run to a "
                "folder that can be written to, and use that one"
            )


def _short(value: object) -> str:
    return few_of([str(item) for item in value]) if isinstance(value, list) else str(value)


def _read_own(path: Path) -> dict[str, Any]:
    """A JSON file of every run; if it is damaged, the error names the fix."""
    try:
        return read_json(path)
    except AnywidthError as error:
        if isinstance(error.__cause__, PermissionError):
            raise  # the file may be intact
        raise AnywidthError(f"{error}: the run is damaged; {MEND}") from error
