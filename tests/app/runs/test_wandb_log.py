"""`--wandb`: the real package, offline; and a clear refusal without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import TINY_RUN, anywidth, assert_refused, command

from anywidth.app.runs import metrics

OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def test_a_run_is_recorded_offline_under_a_name_that_it_keeps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = (*TINY_RUN, "--epochs", "1", "--log-every", "5", "--no-report", "--wandb")
    answer = anywidth("train", *options, "--out", run, **OFFLINE)
    assert answer.returncode == 0, answer.stderr
    (record,) = run.glob("wandb/offline-run-*/run-*.wandb")
    name = (run / "wandb-id.txt").read_text()
    assert record.name == f"run-{name}.wandb"
    content = record.read_bytes()
    for word in (b"loss_max", b"validation_error_min", b"tiny_networks:tiny"):
        assert word in content
    # What to do next, although no report was asked for.
    assert f"anywidth spectrum {run} --trust" in answer.stdout


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    answer = command("train", *TINY_RUN, "--wandb", "--out", tmp_path / "run")
    assert_refused(answer, "anywidth[wandb]")
    assert not (tmp_path / "run").exists()
