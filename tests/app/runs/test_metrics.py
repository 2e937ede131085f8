"""Metrics survive a kill, and a resumed run logs what an unbroken one would."""

import errno
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anywidth.app.runs.metrics import MetricsLog, read_metrics
from anywidth.errors import AnywidthError


def log_steps(log: MetricsLog, first: int, last: int) -> None:
    """Training loss at every step, accuracy in a row of its own from step 4 on."""
    for step in range(first, last + 1):
        log.append(step, {"loss, full width": 1 / (step + 2), "images": 64 * step})
        if step >= 4 and step % 2 == 0:
            log.append(step, {"accuracy": step / 10})


def test_rows_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with MetricsLog(path) as log:
        log.append(1, {"loss": 0.1 + 0.2, "images": 64})
        log.append(2, {"loss": 1e-300, "rate": float("inf")})
        log.append(3, {"loss": float("nan")})
    rows = read_metrics(str(path))
    assert rows[:2] == [
        {"step": 1, "loss": 0.1 + 0.2, "images": 64},
        {"step": 2, "loss": 1e-300, "rate": float("inf")},
    ]
    assert math.isnan(rows[2]["loss"])
    assert type(rows[0]["images"]) is int
    assert path.read_text().splitlines()[:2] == ["step,loss,images,rate", f"1,{0.1 + 0.2!r},64,"]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_every_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.csv")
    for step in range(5):
        log.append(step, {"loss": 1.0})
        assert len(read_metrics(log.path)) == step + 1


@pytest.mark.parametrize("checkpoint", [-1, 0, 3, 4, 5, 8])
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, checkpoint: int, cut: int) -> None:
    with MetricsLog(tmp_path / "unbroken.csv") as log:
        log_steps(log, 0, 12)
    path = tmp_path / "resumed.csv"
    log_steps(MetricsLog(path), 0, 9)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with MetricsLog(path) as log:
        log.truncate_after(checkpoint)
        log_steps(log, checkpoint + 1, 12)
    assert path.read_bytes() == (tmp_path / "unbroken.csv").read_bytes()


def test_a_truncation_also_drops_columns_that_came_later(tmp_path: Path) -> None:
    log_steps(MetricsLog(tmp_path / "short.csv"), 0, 3)
    log = MetricsLog(tmp_path / "long.csv")
    log_steps(log, 0, 9)
    log.truncate_after(3)
    assert log.path.read_bytes() == (tmp_path / "short.csv").read_bytes()


@settings(max_examples=30)
@given(st.data())
def test_a_cut_anywhere_costs_at_most_the_last_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.csv"
    log_steps(MetricsLog(path), 0, 6)
    whole, rows = path.read_bytes(), read_metrics(path)
    length = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:length])
    kept = max(0, whole[:length].count(b"\n") - 1)
    assert read_metrics(path) == rows[:kept]
    log = MetricsLog(path)
    log.append(99, {"loss, full width": 0.5})
    assert read_metrics(path) == [*rows[:kept], {"step": 99, "loss, full width": 0.5}]


def test_a_damaged_line_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for line in ("2", "2,0.5,7", "two,0.5", "2,half", ",0.5", "2.5,0.5"):
        path.write_text(f"step,loss\n1,0.5\n{line}\n3,0.5\n")
        with pytest.raises(AnywidthError, match="line 3"):
            MetricsLog(path)
    path.write_text("name,price\nball,3\n")
    with pytest.raises(AnywidthError, match="'name'"):
        read_metrics(path)
    path.write_text("step,loss\r1,0.5\r\n")
    with pytest.raises(AnywidthError, match=r"metrics\.csv"):
        read_metrics(path)
    with pytest.raises(AnywidthError, match=r"none\.csv"):
        read_metrics(tmp_path / "none.csv")


def test_steps_do_not_go_back_without_a_truncation(tmp_path: Path) -> None:
    log_steps(MetricsLog(tmp_path / "metrics.csv"), 0, 5)
    log = MetricsLog(tmp_path / "metrics.csv")
    with pytest.raises(AnywidthError, match="truncate_after"):
        log.append(3, {"images": 1})
    log.truncate_after(3)
    log.append(3, {"images": 1})


def test_tensorboard_shows_what_the_file_holds(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss/1.0")]

    with MetricsLog(tmp_path / "metrics.csv", tmp_path / "tensorboard") as log:
        for step in range(6):
            log.append(step, {"loss/1.0": float(step)})
            assert shown()[-1] == (step, step)  # flushed: a kill would not lose it
    time.sleep(1.1)  # TensorBoard reads files by name, which holds the second they were begun in
    with MetricsLog(tmp_path / "metrics.csv", tmp_path / "tensorboard") as log:
        log.truncate_after(2)
        for step in range(3, 5):
            log.append(step, {"loss/1.0": step + 0.5})
    assert shown() == [(0, 0), (1, 1), (2, 2), (3, 3.5), (4, 4.5)]
    assert [(row["step"], row["loss/1.0"]) for row in read_metrics(log.path)] == shown()


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    # Before anything is trained.
    with pytest.raises(AnywidthError, match="tensorboard"):
        MetricsLog(tmp_path / "metrics.csv", tmp_path / "tensorboard")
    MetricsLog(tmp_path / "metrics.csv").append(1, {"loss": 1.0})


def full_disk(*arguments: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.csv")
    log.append(1, {"loss": 1.0})
    monkeypatch.setattr("builtins.open", full_disk)
    with pytest.raises(AnywidthError, match="No space"):
        log.append(2, {"loss": 1.0})


def test_without_room_for_tensorboard_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with MetricsLog(tmp_path / "metrics.csv", tmp_path / "tensorboard") as log:
        log.append(1, {"loss": 1.0})
        monkeypatch.setattr(RecordWriter, "flush", full_disk)
        with caplog.at_level(logging.WARNING):
            log.append(2, {"loss": 1.0})
            log.append(3, {"loss": 1.0})
    assert len(read_metrics(log.path)) == 3
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]
