"""The reinforcement-learning task: that it learns, resumes, and what its commands say."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import command
from matplotlib.collections import LineCollection

import anywidth as aw
from anywidth.app.runs import loop as training
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.showing.curves import curves_figure
from anywidth.app.showing.figure_style import style
from anywidth.app.showing.plots import spectra_figure
from anywidth.app.showing.spectrum_tables import format_point, shown_metrics
from anywidth.app.tasks.reinforcement.policies import actions_and_shape, build_model, network_for
from anywidth.app.tasks.reinforcement.rollout import Collector, Rollout
from anywidth.app.tasks.reinforcement.task import (
    ReinforcementSettings,
    TrainedPolicy,
    curve_widths,
    open_trained,
    play,
    train_run,
)
from anywidth.errors import AnywidthError
from anywidth.files import load_tensors, read_json
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

TINY = ReinforcementSettings(
    environments=4,
    rollout=16,
    batch_size=32,
    epochs=1,
    steps=256,
    curve_games=2,
    evaluation_games=3,
    validate_every=2,
    log_every=1,
    checkpoint_every=2,
    longest_game=200,
    device="cpu",
)
ATARI = replace(
    TINY, environment="atari:breakout", divisor=8, clip_rewards=True, curve_games=1, longest_game=20
)
WIDTHS = (0.25, 0.5, 1.0)


def trained_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")[0]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four roll-outs of two updates each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train_run(Run.create(folder, TINY), TINY)
    return folder


# ---- learning ------------------------------------------------------------------------------------


def test_it_learns_to_play_at_every_width(tmp_path: Path) -> None:
    """Seeds 0 to 4 end between 2.9 and 4.5; random play scores about 0.5."""
    settings = replace(
        TINY,
        environments=16,
        rollout=32,
        batch_size=128,
        epochs=3,
        steps=30_000,
        learning_rate=2e-3,
        warmup_updates=100,
        clip=0.2,
        entropy_weight=0.02,
        widths_per_step=2,
        log_every=10,
        validate_every=1000,
        checkpoint_every=1000,
    )
    assert train_run(Run.create(tmp_path / "run", settings), settings)
    trained = open_trained(tmp_path / "run", "cpu")
    for width in WIDTHS:
        with aw.at_width(trained.model, width):
            assert play(trained.model, settings, 60, seed=1, greedy=False).mean > 2
    fresh = build_model(settings, *actions_and_shape(settings.environment))
    assert play(fresh, settings, 60, seed=1, greedy=False).mean < 1


def test_ppo_balances_cartpole(tmp_path: Path) -> None:
    """A random policy holds out for about 22 steps; 500 is the most."""
    settings = replace(
        TINY,
        environment="gym:CartPole-v1",
        method="i",
        environments=8,
        rollout=32,
        batch_size=256,
        epochs=10,
        steps=25_000,
        learning_rate=2e-3,
        clip=0.2,
        anneal_clip=True,
        clip_values=False,
        entropy_weight=0.0,
        discount=0.98,
        smoothing=0.8,
        longest_game=None,
        log_every=20,
        validate_every=1000,
        checkpoint_every=1000,
    )
    assert train_run(Run.create(tmp_path / "run", settings), settings)
    trained = open_trained(tmp_path / "run", "cpu")
    assert play(trained.model, settings, 20, seed=1, greedy=True).mean > 150


@pytest.mark.parametrize("distill", ["kl", "ppo", "none"])
def test_atari_trains_in_every_way(distill: str, tmp_path: Path) -> None:
    settings = replace(ATARI, distill=distill, steps=128, checkpoint_every=1)
    folder = tmp_path / "run"
    assert train_run(Run.create(folder, settings), settings)
    (checkpoint, _) = sorted((folder / "checkpoints").iterdir())
    # Small enough to carry a run from one machine to another.
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 16 * 2**20
    before = build_model(settings, 4, (4, 84, 84)).state_dict()
    after = trained_weights(folder)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.isfinite().all()
        assert not torch.equal(tensor, before[name]), name
    rows = read_metrics(folder / "metrics.csv")
    assert [row["agent_steps"] for row in rows] == [64, 128]
    for row in rows:
        for name in ("policy_loss", "value_loss", "entropy", "divergence/0.25"):
            assert math.isfinite(row[name])
    assert {f"score/{width}" for width in (0.25, 0.5, 0.75, 1.0)} <= rows[-1].keys()


# ---- the network ---------------------------------------------------------------------------------


def test_an_individual_network_is_built_for_its_width() -> None:
    model = build_model(replace(ATARI, method="i", width=0.25), 4, (4, 84, 84))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["features.0.weight"] == (8, 4, 8, 8)
    assert shapes["features.2.weight"] == (16, 8, 4, 4)
    assert shapes["features.4.weight"] == (8, 16, 3, 3)
    assert shapes["hidden.weight"] == (128, 8 * 7 * 7)
    rows = model.state_dict()["hidden.weight"]
    torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(128), atol=1e-4, rtol=0)
    with pytest.raises(AnywidthError, match="width"):
        replace(ATARI, method="i", width=1.5).check()


def test_environments_get_the_network_that_fits() -> None:
    assert network_for(4, (4, 84, 84)).hidden.in_features == 32 * 7 * 7
    assert network_for(3, (4, 10, 10)).hidden.in_features == 32 * 8 * 8
    assert network_for(2, (4,)).hidden.in_features == 64
    with pytest.raises(AnywidthError, match=re.escape("(3, 20, 30)")):
        network_for(2, (3, 20, 30))


def test_curves_are_of_both_ends_and_two_between() -> None:
    assert curve_widths(TINY) == [0.25, 0.5, 0.75, 1.0]
    assert curve_widths(replace(TINY, low=0.4)) == [0.4, 0.6, 0.8, 1.0]
    assert curve_widths(replace(TINY, method="i", width=0.25)) == [0.25]


def test_a_range_of_one_width_is_played_once() -> None:
    alone = replace(TINY, low=1.0)
    assert curve_widths(alone) == alone.widths == [1.0]


# ---- stopping and resuming -----------------------------------------------------------------------


def test_metrics_count_agent_steps(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert [row["agent_steps"] for row in rows] == [64, 128, 192, 256]
    assert [row["agent_steps"] for row in rows if "score/0.25" in row] == [128, 256]
    assert all(row["agent_steps_per_second"] > 0 for row in rows[1:])
    state = read_json(finished / "finished.json")["state"]
    expected = {"updates": 8, "agent_steps": 256, "actions": 3, "observation_shape": [4, 10, 10]}
    assert state == expected


@pytest.mark.parametrize("settings", [TINY, ATARI], ids=["minatar", "atari"])
def test_a_killed_run_goes_on_where_it_was(
    settings: ReinforcementSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, seen = training.save_checkpoint, []

    def save_and_die(run: Run, step: aw.SandwichStep) -> None:
        saved(run, step)
        seen.append(step)
        monkeypatch.undo()
        raise KeyboardInterrupt

    loaded = training.load_checkpoint

    def load_and_compare(run: Run, step: aw.SandwichStep) -> int:
        count = loaded(run, step)
        if seen:
            (before,) = seen
            for name, tensor in before.model.state_dict().items():
                assert torch.equal(step.model.state_dict()[name], tensor)
            old, new = (s.optimizer.state_dict()["state"] for s in (before, step))
            assert all(torch.equal(old[i]["exp_avg_sq"], new[i]["exp_avg_sq"]) for i in old)
            assert count == before.count == 4
            seen.append(step)
        return count

    monkeypatch.setattr(training, "save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_run(Run.create(tmp_path / "run", settings), settings)
    monkeypatch.setattr(training, "load_checkpoint", load_and_compare)
    torch.rand(3)
    assert train_run(Run.open(tmp_path / "run", writing=True), settings)
    assert len(seen) == 2
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["agent_steps"] for row in rows] == [64, 128, 192, 256]


def test_sigterm_ends_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY, epochs=3, log_every=10)
    collect = Collector.collect

    def terminated(collector: Collector) -> Rollout:
        os.kill(os.getpid(), signal.SIGTERM)
        return collect(collector)

    run = Run.create(tmp_path / "run", settings)
    monkeypatch.setattr(Collector, "collect", terminated)
    assert not train_run(run, settings)
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == 1  # the first of six updates on the first roll-out
    monkeypatch.undo()
    assert train_run(Run.open(run.folder, writing=True), settings)
    assert run.state()["updates"] == 24


# ---- commands ------------------------------------------------------------------------------------


def test_spectrum_and_report(finished: Path) -> None:
    answer = command("spectrum", finished, "--widths", "0.25,1.0", "--no-latency")
    assert answer.code == 0
    assert "mean score" in answer.output
    with open(finished / "spectrum.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    scores = ["score", "score_standard_error", "greedy_score", "greedy_score_standard_error"]
    assert list(rows[0]) == ["width", "macs", "parameters", *scores, "latency_ms"]
    assert command("spectrum", finished, "--widths", "0.25,1.0", "--no-latency").code == 0
    with open(finished / "spectrum.csv", newline="") as file:
        assert list(csv.DictReader(file)) == rows  # the same games again
    for name in ("spectrum", "spectrum_score", "spectrum_greedy_score"):
        assert (finished / "plots" / f"{name}.svg").is_file()
    assert command("report", finished).code == 0
    page = (finished / "report.html").read_text()
    assert "US-PPO on minatar:breakout" in page
    assert "agent steps" in page
    assert "batch norm" in command("calibrate", finished).output


def score_point(width: float, score: float, error: float) -> SpectrumPoint:
    metrics = {"score": score, "score_standard_error": error}
    return SpectrumPoint(width, ChannelConfig(()), int(100 * width), 10, metrics)


def test_scores_are_shown_with_their_standard_error() -> None:
    points = score_point(0.25, 4.0, 0.5), score_point(1.0, 8.126, 0.25)
    found = Spectrum("US-PPO", points, described=TrainedPolicy.metrics)
    score = found.describe("score")
    assert shown_metrics(found) == ["score"]
    assert [format_point(point, "score", score) for point in points] == [
        "4.00 ± 0.50",
        "8.13 ± 0.25",
    ]
    assert found.best() is points[1]
    with style():
        axes = spectra_figure([found]).axes[0]
    (bars,) = [part for part in axes.collections if isinstance(part, LineCollection)]
    ends = [sorted(segment[:, 1]) for segment in bars.get_segments()]
    assert ends == [pytest.approx([3.5, 4.5]), pytest.approx([7.876, 8.376])]
    low, high = axes.get_ylim()
    assert low < 3.5
    assert high > 8.376


def test_curves_are_drawn_over_agent_steps() -> None:
    rows = [{"step": 2 * n, "agent_steps": 64.0 * n, "score/0.25": 1.0 * n} for n in (1, 2, 3)]
    with style():
        axes = curves_figure(rows, TrainedPolicy.curves).axes[0]
    assert axes.get_xlabel() == "agent steps"
    assert axes.lines[0].get_xdata().tolist() == [64, 128, 192]


def test_train_command_goes_from_recipe_to_report(tmp_path: Path) -> None:
    small = ["--environments", 4, "--rollout", 16, "--batch-size", 64, "--steps", 64]
    games = ["--curve-games", 2, "--evaluation-games", 2]
    out = ["--out", tmp_path / "run", "--device", "cpu"]
    answer = command("train", "rl", *small, *games, *out)
    assert answer.code == 0
    for width in ("0.25", "0.4", "0.5", "0.75", "1.0"):
        assert re.search(rf"^ *{re.escape(width)} ", answer.output, re.MULTILINE)
    assert (tmp_path / "run" / "report.html").is_file()


def test_individual_networks_stand_beside_their_width(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    settings = replace(TINY, method="i", width=0.5, steps=64)
    assert train_run(Run.create(folder, settings), settings)
    assert "score/0.5" in read_metrics(folder / "metrics.csv")[-1]
    assert command("spectrum", folder, "--no-latency").code == 0
    with open(folder / "spectrum.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["width"] == "0.5"
    assert command("spectrum", finished, "--widths", "0.25,0.5", "--no-latency").code == 0
    answer = command("compare", finished, folder, "--out", tmp_path / "both.png")
    assert answer.code == 0
    assert "I-PPO" in answer.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--environment", "minatar:pong"], "'pong'"),
        (["--environment", "chess"], "'chess'"),
        (["--batch-size", "1000"], "1024"),
        (["--batch-size", "1"], "--batch-size"),
        (["--steps", "0"], "steps"),
        (["--distill", "l1"], "ppo"),
        (["--enviroments", "8"], "--environments"),
        (["--method", "i", "--width", "0"], "width"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str], said: str, tmp_path: Path
) -> None:
    out = ["--out", tmp_path / "run", "--device", "cpu"]
    answer = command("train", "rl", *options, *out)
    assert answer.code == 2
    assert said in answer.errors
    assert len(answer.errors.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
