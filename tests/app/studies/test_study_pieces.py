"""Training in pieces: runs that go on, deadlines, and what is kept of each piece."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from anywidth.app.runs.run import Run
from anywidth.app.studies.processes import terminated_at
from anywidth.app.studies.trainings import read_pieces, train_piece
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.errors import AnywidthError

SETTINGS = ClassificationSettings(device="cpu")


def never(run: Run, settings: ClassificationSettings) -> bool:
    raise AssertionError("trained")


def test_a_deadline_asks_training_to_stop(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))

    def train_run(run: Run, settings: ClassificationSettings) -> bool:
        given_up = time.monotonic() + 60
        while not asked and time.monotonic() < given_up:
            time.sleep(0.01)
        return False

    run = Run.create(tmp_path / "run", SETTINGS)
    with terminated_at(time.time() + 0.2):
        assert not train_piece(run, SETTINGS, train_run)
    assert asked == [signal.SIGTERM]
    (piece,) = read_pieces(run.folder)
    assert piece["steps"] == 0
    assert {"seconds", "commit", "torch", "device"} <= piece.keys()


def test_a_piece_that_is_killed_leaves_its_provenance(tmp_path: Path) -> None:
    class Kill(BaseException):
        pass

    def killed(run: Run, settings: ClassificationSettings) -> bool:
        raise Kill

    run = Run.create(tmp_path / "run", SETTINGS)
    with pytest.raises(Kill):
        train_piece(run, SETTINGS, killed)
    assert train_piece(run, SETTINGS, lambda run, settings: True)
    first, second = read_pieces(run.folder)
    assert first == {**second, "steps": 0, "seconds": 0.0, "killed": True}


@pytest.mark.parametrize(
    "text", ["{}", '{"pieces": [1]}', '{"pieces": [{"steps": 3}]}', '{"pieces": 3}', '{"pie']
)
def test_damaged_pieces_are_named_with_a_cure(tmp_path: Path, text: str) -> None:
    (tmp_path / "pieces.json").write_text(text)
    with pytest.raises(AnywidthError, match=r"pieces\.json"):
        read_pieces(tmp_path)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", SETTINGS)
    run.save_final({"model": {}, "statistics": {}}, {"steps": 1})
    assert train_piece(run, SETTINGS, never)
    assert read_pieces(run.folder) == []
