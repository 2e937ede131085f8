"""A run's folder: what was asked for, checkpoints that survive a kill, and the finished network.

    RUN/config.json                      the configuration, with its version
    RUN/checkpoints/step-000001234/      a file a part (model, optimizer, ...) and manifest.json
    RUN/model.safetensors                the finished network,
    RUN/statistics.safetensors           its batch-norm statistics,
    RUN/finished.json                    and the mark that both are complete
    RUN/metrics.csv, tensorboard/, plots/

A checkpoint is built under a temporary name and renamed once it is on the disk, and it is only
used if every file has the size and checksum in its manifest. So a kill at any moment costs the
steps since the last checkpoint and nothing else. One process at a time may train a run: who creates
it, or opens it for writing, holds it until the `Run` is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anywidth.config import Config, ConfigType, from_json, to_json
from anywidth.errors import AnywidthError
from anywidth.files import (
    decode_tensors,
    encode_tensors,
    errors_that_name,
    is_leftover,
    load_tensors,
    make_folder,
    read_bytes,
    read_json,
    remove,
    remove_leftovers,
    save_tensors,
    sync_folder,
    temporary_path,
    write_atomically,
    write_json,
    write_together,
)
from anywidth.folder_lock import FolderLock, lock_folder

Tensors = Mapping[str, Tensor]
Metadata = Mapping[str, str]

logger = logging.getLogger(__name__)

MEND = "restore it from a copy, or train again with another --out"
"""What helps where a file of a run is damaged."""

_LAYOUT_VERSION = 1
_MANIFEST = "manifest.json"
_FINISHED = "finished.json"
# The parts every finished network has; any other that is asked for was never there.
_FINAL_PARTS = ("model", "statistics")
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` training steps.

    Args:
        step: how many training steps have been done.
        tensors: part ("model", "optimizer", ...) → name → tensor, on the CPU.
        metadata: part → the text that was saved with it.
        state: the counters and other JSON data that were saved.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    metadata: dict[str, dict[str, str]]
    state: dict[str, Any]


class Run:
    """A run's folder, from `Run.create` or `Run.open`."""

    def __init__(self, folder: Path, config_data: dict[str, Any], writing: bool) -> None:
        self.folder = folder
        self.config_data = config_data
        self.metrics_path = folder / "metrics.csv"
        self.tensorboard_folder = folder / "tensorboard"
        self.plots_folder = folder / "plots"
        self._checkpoints = folder / "checkpoints"
        self._writing = writing
        self._lock: FolderLock | None = None
        self._refused: set[Path] = set()

    @classmethod
    def create(cls, folder: str | Path, config: Config) -> Run:
        """Starts a run in a new or empty folder and writes its configuration."""
        folder = Path(folder)
        data = to_json(config)
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

    def read_config(self, kind: type[ConfigType]) -> ConfigType:
        """The configuration in config.json; errors name the file."""
        try:
            return from_json(kind, self.config_data)
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
        if not isinstance(step, int) or step < 0:
            raise AnywidthError(f"step {step!r} must be a whole number of at least 0")
        if keep < 1:
            raise AnywidthError(f"keep={keep}: at least one checkpoint must be kept")
        saved = [path for path in self._checkpoint_folders() if path not in self._refused]
        if saved and _position(saved[-1])[0] > step:
            raise AnywidthError(
                f"step {step} lies before {saved[-1]}, which is already saved; continue from it: "
                "run.load_checkpoint()"
            )
        folder = self._fresh_checkpoint_folder(step)
        self._checkpoints.mkdir(exist_ok=True)
        sync_folder(self.folder)
        temporary = temporary_path(folder)
        try:
            with errors_that_name(folder):
                temporary.mkdir()
            files = {}
            for part, values in tensors.items():
                name = _part_file(part)
                data = encode_tensors(values, (metadata or {}).get(part), folder / name)
                write_atomically(temporary / name, data, named=folder / name)
                files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest = {"version": _LAYOUT_VERSION, "step": step, "files": files, "state": state}
            checked = {"sha256": _checksum(manifest), **manifest}
            write_json(temporary / _MANIFEST, checked, named=folder / _MANIFEST)
            with errors_that_name(folder):
                os.rename(temporary, folder)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
        sync_folder(self._checkpoints)
        others = [path for path in saved if _position(path)[0] != step]
        stay = {folder, *others[max(0, len(others) - keep + 1) :]}
        for path in self._checkpoint_folders():
            if path not in stay:
                self._remove_checkpoint(path)
        return folder

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where none was ever saved.

        A damaged one is named once in the log, which without further settings is a plain line on
        standard error, and the one before it is taken.
        """
        known = set(self._refused)
        reasons: dict[Path, str] = {}
        for folder in reversed(self._checkpoint_folders()):
            try:
                checkpoint = _read_checkpoint(folder)
            except AnywidthError as error:
                self._refused.add(folder)
                reasons[folder] = str(error)
                continue
            for refused, reason in reasons.items():
                if refused not in known:
                    logger.warning(
                        "damaged checkpoint refused: %s; going back to step %d",
                        reason,
                        checkpoint.step,
                    )
            return checkpoint
        if reasons:
            raise AnywidthError(
                f"{self.folder}: every checkpoint is damaged; start again with another --out. "
                + "; ".join(reasons.values())
            )
        return None

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
        checksum = _checksum(state)
        finished = self.folder / _FINISHED
        if finished.exists():
            finished.unlink()
            sync_folder(self.folder)
        for part, values in tensors.items():
            save_tensors(self.folder / _part_file(part), values, (metadata or {}).get(part))
        write_json(finished, {"version": _LAYOUT_VERSION, "state": state, "sha256": checksum})

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
        path = self.folder / _part_file("statistics")
        contents = {path: encode_tensors(tensors, metadata, path)}
        if model is not None:
            path = self.folder / _part_file("model")
            contents[path] = encode_tensors(model, None, path)
        write_together(contents)

    def load_part(self, part: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """A part's tensors and metadata: the finished ones, or the newest checkpoint's."""
        if self.finished:
            path = self.folder / _part_file(part)
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
            if found.get("sha256") not in (None, _checksum(state)):
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
            if self._checkpoint_folders():
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

    def _checkpoint_folders(self) -> list[Path]:
        """Oldest first."""
        folders = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        return sorted((path for path in folders if _STEP.fullmatch(path.name)), key=_position)

    def _fresh_checkpoint_folder(self, step: int) -> Path:
        """A step saved again gets a new name, so that the old one stays until the new is whole."""
        times = [
            again for saved, again in map(_position, self._checkpoint_folders()) if saved == step
        ]
        name = f"step-{step:09d}" + (f".{max(times) + 1}" if times else "")
        return self._checkpoints / name

    def _remove_checkpoint(self, folder: Path) -> None:
        """Renamed first: a kill halfway must not leave a checkpoint with files missing."""
        temporary = temporary_path(folder)
        os.rename(folder, temporary)
        remove(temporary)
        self._refused.discard(folder)


def _read_own(path: Path) -> dict[str, Any]:
    """A JSON file that every run has; where it is damaged, the error says how to mend it."""
    try:
        return read_json(path)
    except AnywidthError as error:
        if isinstance(error.__cause__, PermissionError):
            raise  # the file may well be whole
        raise AnywidthError(f"{error}: the run is damaged; {MEND}") from error


def _position(folder: Path) -> tuple[int, int]:
    """The step, and how many times that step had been saved before."""
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _part_file(part: str) -> str:
    if not part.isidentifier():
        raise AnywidthError(f"part {part!r} names a file; use a plain word such as 'model'")
    return f"{part}.safetensors"


def _checksum(data: Mapping[str, Any]) -> str:
    """Of the data as they will be read back: JSON turns every key into text."""
    try:
        text = json.dumps(json.loads(json.dumps(data)), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise AnywidthError(
            f"the state to save is not JSON data ({error}); it can hold numbers, text, None, "
            "lists and dicts, and flatten_state takes tensors apart"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()


def _read_checkpoint(folder: Path) -> Checkpoint:
    path = folder / _MANIFEST
    manifest = read_json(path)
    expected = manifest.pop("sha256", None)
    if manifest.get("version") != _LAYOUT_VERSION:
        raise AnywidthError(
            f"{path}: layout version {manifest.get('version')!r}; this anywidth reads version "
            f"{_LAYOUT_VERSION}"
        )
    if _checksum(manifest) != expected:
        raise AnywidthError(f"{path}: its content does not fit its checksum")
    tensors, metadata = {}, {}
    for name, entry in manifest["files"].items():
        path = folder / name
        data = read_bytes(path)
        if len(data) != entry["bytes"]:
            raise AnywidthError(f"{path}: {len(data)} bytes; its manifest says {entry['bytes']}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise AnywidthError(f"{path}: its content does not fit its checksum")
        tensors[path.stem], metadata[path.stem] = decode_tensors(data, path)
    return Checkpoint(manifest["step"], tensors, metadata, manifest["state"])
