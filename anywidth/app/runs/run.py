"""A run's folder: what was asked for, checkpoints that survive a kill, and the finished network.

    RUN/config.json                 the configuration, with its version
    RUN/checkpoints/                see `anywidth.app.runs.checkpoints`
    RUN/model.safetensors           the finished network,
    RUN/statistics.safetensors      its batch-norm statistics,
    RUN/finished.json               and the mark that both are complete
    RUN/metrics.csv, tensorboard/, plots/

One process at a time may train a run: who creates it, or opens it for writing, holds it until the
`Run` is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from anywidth.app.runs.checkpoints import (
    LAYOUT_VERSION,
    Checkpoint,
    Checkpoints,
    Metadata,
    Tensors,
    checksum_of,
    part_file,
)
from anywidth.app.runs.folder_lock import FolderLock, lock_folder
from anywidth.app.runs.settings import Settings, SettingsType, from_json, to_json
from anywidth.errors import AnywidthError
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
"""What helps where a file of a run is damaged."""

_FINISHED = "finished.json"
# The parts every finished network has; any other that is asked for was never there.
_FINAL_PARTS = ("model", "statistics")


class Run:
    """A run's folder, from `Run.create` or `Run.open`."""

    def __init__(self, folder: Path, settings_data: dict[str, Any], writing: bool) -> None:
        self.folder = folder
        self.settings_data = settings_data
        self.metrics_path = folder / "metrics.csv"
        self.tensorboard_folder = folder / "tensorboard"
        self.plots_folder = folder / "plots"
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._writing = writing
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, folder: str | Path, settings: Settings) -> Run:
        """Starts a run in a new or empty folder, checks its settings and writes them."""
        settings.check()
        folder = Path(folder)
        data = to_json(settings)
        make_folder(folder)
        lock = lock_folder(folder)
        if not all(is_leftover(path) for path in folder.iterdir()):
            raise AnywidthError(
                f"{folder} is not empty; continue the run in it with --resume {folder}, or choose "
                "another folder with --out"
            )
        remove_leftovers(folder)
        write_json(folder / "config.json", data)
        sync_folder(folder.parent)
        run = cls(folder, data, writing=True)
        run._lock = lock
        return run

    @classmethod
    def open(cls, folder: str | Path, *, writing: bool = False) -> Run:
        """Opens a run that exists.

        Args:
            folder: the run's folder.
            writing: allow saving, and remove what a killed process left half written. Ask for it
                in one process only (of several ranks, rank 0).
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise AnywidthError(f"{folder} is not a run: there is no such folder")
        if not (folder / "config.json").is_file():
            raise AnywidthError(
                f"{folder} is not a run: config.json is missing; start one with "
                f"`anywidth train --out {folder}`"
            )
        run = cls(folder, _read_own(folder / "config.json"), writing)
        if writing:
            run._lock = lock_folder(folder)
            remove_leftovers(folder)
            remove_leftovers(folder / "checkpoints")
        return run

    def read_settings(self, kind: type[SettingsType]) -> SettingsType:
        """The configuration in config.json; errors name the file."""
        try:
            return from_json(kind, self.settings_data)
        except AnywidthError as error:
            raise AnywidthError(f"{self.folder / 'config.json'}: {error}") from error

    @classmethod
    def open_finished(cls, folder: str | Path, *, writing: bool = False) -> Run:
        """Opens a run that has been trained to its end.

        Nothing is removed, for another process may be writing: a training that has not ended yet,
        or a calibration.
        """
        run = cls.open(folder)
        run._writing = writing
        if not run.finished:
            raise AnywidthError(
                f"{run.folder} has not finished training; go on with: "
                f"anywidth train --resume {run.folder}"
            )
        return run

    @property
    def finished(self) -> bool:
        """Whether training has ended and `save_final` has completed."""
        return (self.folder / _FINISHED).is_file()

    def save_checkpoint(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Metadata] | None = None,
        keep: int = 2,
    ) -> Path:
        """Writes the state after `step` steps and returns the checkpoint's folder.

        Args:
            step: how many training steps have been done; never less than in a saved checkpoint.
            tensors: part → name → tensor; each part becomes a safetensors file.
            state: JSON data such as the epoch, counters and what `flatten_state` returns.
            metadata: part → text to keep in that part's file.
            keep: how many of the newest checkpoints stay; older ones are removed at the end.
        """
        self._check_writing()
        return self._checkpoints.save(step, tensors, state, metadata or {}, keep)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where none was ever saved.

        A damaged one is named once in the log, which without further settings is a plain line on
        standard error, and the one before it is taken.
        """
        return self._checkpoints.load()

    def save_final(
        self,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        *,
        metadata: Mapping[str, Metadata] | None = None,
    ) -> None:
        """Writes the finished network's parts ("model", "statistics") and marks the run finished.

        Until the last of them is on the disk, the run counts as unfinished.
        """
        self._check_writing()
        checksum = checksum_of(state)
        finished = self.folder / _FINISHED
        if finished.exists():
            finished.unlink()
            sync_folder(self.folder)
        for part, values in tensors.items():
            save_tensors(self.folder / part_file(part), values, (metadata or {}).get(part))
        write_json(finished, {"version": LAYOUT_VERSION, "state": state, "sha256": checksum})

    def save_statistics(
        self, tensors: Tensors, metadata: Metadata | None = None, *, model: Tensors | None = None
    ) -> None:
        """Replaces the finished network's batch-norm statistics, after calibrating more widths.

        Args:
            tensors: the statistics.
            metadata: text to keep with them.
            model: the `state_dict`, where the full width was calibrated: those are its buffers.
        """
        self._check_writing()
        if not self.finished:
            raise AnywidthError(
                f"{self.folder} is not finished; end its training first: "
                f"`anywidth train --resume {self.folder}`"
            )
        path = self.folder / part_file("statistics")
        contents = {path: encode_tensors(tensors, metadata, path)}
        if model is not None:
            path = self.folder / part_file("model")
            contents[path] = encode_tensors(model, None, path)
        write_together(contents)

    def load_part(self, part: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """A part's tensors and metadata: the finished ones, or the newest checkpoint's."""
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
        raise AnywidthError(f"{self.folder} has no part {part!r}; it has {', '.join(parts)}")

    def model_tensors(self) -> dict[str, Tensor]:
        """The network's `state_dict`: the finished one, or the newest checkpoint's."""
        return self.load_part("model")[0]

    def state(self) -> dict[str, Any]:
        """The JSON data saved with the finished network, or with the newest checkpoint."""
        if self.finished:
            path = self.folder / _FINISHED
            found = _read_own(path)
            state = found.get("state")
            if not isinstance(state, dict):
                raise AnywidthError(
                    f"{path}: no state in it, so the finished run is damaged; {MEND}"
                )
            if found.get("sha256") not in (None, checksum_of(state)):
                raise AnywidthError(f"{path}: its content does not fit its checksum; {MEND}")
            return state
        return self._newest().state

    def _load_final(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """A file of the finished network; where it is damaged, the error says how to mend it."""
        try:
            return load_tensors(path)
        except AnywidthError as error:
            if isinstance(error.__cause__, PermissionError):
                raise  # the file may well be whole
            problem = str(error) if path.exists() else f"{path} is missing"
            mend = MEND
            if self._checkpoints.folders():
                away = "" if path.is_file() or not path.exists() else f"move {path} away, "
                mend = (
                    f"restore it from a copy, or make it anew from the last checkpoint: {away}"
                    f"remove {self.folder / _FINISHED}, then "
                    f"`anywidth train --resume {self.folder}`"
                )
            raise AnywidthError(f"{problem}: the finished run is damaged; {mend}") from error

    def _newest(self) -> Checkpoint:
        checkpoint = self.load_checkpoint()
        if checkpoint is None:
            raise AnywidthError(
                f"{self.folder} has no checkpoint yet; train it: "
                f"`anywidth train --resume {self.folder}`"
            )
        return checkpoint

    def _check_writing(self) -> None:
        if not self._writing:
            raise AnywidthError(
                f"{self.folder} was opened for reading; to save, use "
                f"Run.open({str(self.folder)!r}, writing=True)"
            )


def _read_own(path: Path) -> dict[str, Any]:
    """A JSON file that every run has; where it is damaged, the error says how to mend it."""
    try:
        return read_json(path)
    except AnywidthError as error:
        if isinstance(error.__cause__, PermissionError):
            raise  # the file may well be whole
        raise AnywidthError(f"{error}: the run is damaged; {MEND}") from error
