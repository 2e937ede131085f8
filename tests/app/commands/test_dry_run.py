"""`anywidth train --dry-run`: a few measured steps, and nothing on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import TINY_RUN, assert_refused, command, succeed

from anywidth.app.runs.dry_run import Forecast

pytestmark = pytest.mark.usefixtures("images_unpacked_once")

TINY_PICTURES = ("sr", "--channels", "8", "--blocks", "1", "--batch-size", "2", "--device", "cpu",
                 "--steps-per-epoch", "7", "--epochs", "3")  # fmt: skip
TINY_GAMES = ("rl", "--device", "cpu", "--environments", "4", "--rollout", "8", "--batch-size",
              "16", "--epochs", "1", "--steps", "320")  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "steps"), [(TINY_RUN, "30"), (TINY_PICTURES, "21"), (TINY_GAMES, "20")]
)
def test_it_tells_steps_time_and_memory_and_writes_nothing(
    arguments: tuple[str, ...], steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = succeed("train", *arguments, "--dry-run")
    assert re.search(rf"steps\s+{steps}: ", answer.output)
    assert re.search(r"time\s+about \d+:\d\d:\d\d", answer.output)
    assert re.search(r"memory\s+\d+\.\d\d GiB", answer.output)
    assert "CPU" in answer.output
    assert not list(tmp_path.iterdir())


def test_what_would_stop_a_training_stops_its_dry_run(tmp_path: Path, i_net: Path) -> None:
    for options, word in (
        (("--batch-size", "100000"), "100000"),
        (("--epochs", "0"), "epochs"),
        (("--out", i_net), "--resume"),
    ):
        assert_refused(command("train", *TINY_RUN, *options, "--dry-run"), word)
    assert_refused(command("train", "--resume", i_net, "--dry-run"), "--dry-run")


def test_a_forecast_reads_well() -> None:
    found = Forecast(250, 312_500, 1024, 0.5, 10, 156_250.0, 3 * 2**30, "H200")
    text = str(found)
    assert "312,500: 250 epochs of 1,250 steps, batch size 1,024" in text
    assert "1 day, 19:24:10" in text
    assert "500 ms" in text
    assert "3.00 GiB" in text
