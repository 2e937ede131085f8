"""Training in pieces: runs that go on, deadlines, and what is kept of each piece."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from anywidth.app.runs.run import Run
from anywidth.app.studies.pieces import open_run, read_pieces, steps_per_second, train_piece
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.errors import AnywidthError

SETTINGS = ClassificationSettings(device="cpu")


def never(run: Run, settings: ClassificationSettings) -> bool:
    raise AssertionError("trained")


def test_a_run_goes_on_with_the_same_choices_alone(tmp_path: Path) -> None:
    begun = open_run(tmp_path / "run", SETTINGS)
    again = open_run(tmp_path / "run", replace(SETTINGS, workers=3), unread={"workers"})
    assert again.settings_data == begun.settings_data
    with pytest.raises(AnywidthError, match="--runs"):
        open_run(tmp_path / "run", replace(SETTINGS, epochs=3), option="--runs")


def test_a_deadline_asks_training_to_stop(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))

    def train_run(run: Run, settings: ClassificationSettings) -> bool:
        given_up = time.monotonic() + 60
        while not asked and time.monotonic() < given_up:
            time.sleep(0.01)
        return False

    run = open_run(tmp_path / "run", SETTINGS)
    is_done, piece = train_piece(run, SETTINGS, train_run, time.time() + 0.5)
    assert not is_done
    assert asked == [signal.SIGTERM]
    assert piece["steps"] == 0
    assert {"seconds", "commit", "torch", "device"} <= piece.keys()
    assert read_pieces(run.folder) == [piece]


def test_a_piece_that_is_killed_leaves_its_provenance(tmp_path: Path) -> None:
    class Kill(BaseException):
        pass

    def killed(run: Run, settings: ClassificationSettings) -> bool:
        raise Kill

    run = open_run(tmp_path / "run", SETTINGS)
    with pytest.raises(Kill):
        train_piece(run, SETTINGS, killed)
    _, piece = train_piece(run, SETTINGS, lambda run, settings: True)
    first, second = read_pieces(run.folder)
    assert second == piece
    assert first == {**piece, "steps": 0, "seconds": 0.0, "killed": True}
    assert steps_per_second([first, {"steps": 4, "seconds": 2.0}]) == 2


@pytest.mark.parametrize(
    "text", ["{}", '{"pieces": [1]}', '{"pieces": [{"steps": 3}]}', '{"pieces": 3}', '{"pie']
)
def test_damaged_pieces_are_named_with_a_cure(tmp_path: Path, text: str) -> None:
    (tmp_path / "pieces.json").write_text(text)
    with pytest.raises(AnywidthError, match=r"pieces\.json"):
        read_pieces(tmp_path)


def test_nothing_is_begun_after_the_deadline_or_the_end(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", SETTINGS)
    nothing = {"steps": 0, "seconds": 0.0}
    assert train_piece(run, SETTINGS, never, time.time()) == (False, nothing)
    run.save_final({"model": {}, "statistics": {}}, {"steps": 1})
    assert train_piece(run, SETTINGS, never) == (True, nothing)
    assert read_pieces(run.folder) == []


def test_pace_is_over_all_pieces() -> None:
    assert steps_per_second([{"steps": 10, "seconds": 4.0}, {"steps": 0, "seconds": 1.0}]) == 2
    assert steps_per_second([]) == 0
