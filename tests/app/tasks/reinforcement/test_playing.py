"""Playing full games: which are counted, what is drawn, and how a game looks on file."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from atari_reference import NoOps
from command_line import command
from PIL import Image
from torch import Tensor

import anywidth as aw
from anywidth.app.runs.loop import save_final
from anywidth.app.runs.run import Run
from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.environments.recording import (
    Recording,
    check_video_path,
    save_recording,
)
from anywidth.app.tasks.reinforcement.playing import Actor, GameScores, play_games, record_game
from anywidth.app.tasks.super_resolution.task import SuperResolutionSettings
from anywidth.errors import AnywidthError
from anywidth.models.atari_cnn import ActorCritic

GAME = "minatar:breakout"


def uniform(observations: Tensor) -> Tensor:
    return torch.zeros(len(observations), 3)


@pytest.fixture
def network() -> ActorCritic:
    model = aw.models.minatar_cnn()
    torch.nn.init.orthogonal_(model.policy.weight, 0.5)
    return model


# ---- scores ----------------------------------------------------------------------------------


def test_mean_and_standard_error() -> None:
    scores = GameScores((1.0, 2.0, 3.0, 6.0))
    assert scores.mean == 3.0
    assert scores.standard_error == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3) / 2)
    assert GameScores((4.0,)).standard_error == 0


def test_each_environments_first_games_count() -> None:
    """Seven games on three environments are the first 3, 2 and 2, however long they last."""
    found = play_games(uniform, GAME, 7, seed=5, greedy=False, count=3)
    environment = make_environment(GAME, 3, seed=5, training=False)
    act = Actor(uniform, 3, 5, False)
    observations = environment.reset()
    scores: list[list[float]] = [[], [], []]
    lengths: list[list[int]] = [[], [], []]
    for step in range(400):
        outcome = environment.step(act(observations))
        observations = outcome.observations
        for player, score in zip(np.flatnonzero(outcome.finished), outcome.scores, strict=True):
            scores[player].append(score)
            lengths[player].append(step)
    assert found.scores == (*scores[0][:3], *scores[1][:2], *scores[2][:2])
    in_order_of_time = sorted(step for own in lengths for step in own)[:7]
    counted = sorted(lengths[0][:3] + lengths[1][:2] + lengths[2][:2])
    assert in_order_of_time != counted  # the seven that are over first are other games


def test_the_mean_does_not_depend_on_how_many_play_side_by_side() -> None:
    alone = play_games(uniform, GAME, 400, seed=0, greedy=False, count=1)
    together = play_games(uniform, GAME, 400, seed=1, greedy=False, count=400)
    error = math.hypot(alone.standard_error, together.standard_error)
    assert len(alone.scores) == len(together.scores) == 400
    assert abs(alone.mean - together.mean) < 3 * error
    assert 0.02 < error < 0.1


def test_the_seed_decides(network: ActorCritic) -> None:
    played = [
        play_games(network, GAME, 30, seed, greedy=greedy, count=4)
        for seed, greedy in ((1, False), (1, False), (2, False), (1, True))
    ]
    assert played[0] == played[1]
    assert len({scores.scores for scores in played}) == 3


def test_atari_is_played_to_the_last_life() -> None:
    """One who never fires never loses: only a cut ends the game."""

    def waits(observations: Tensor) -> Tensor:
        assert observations.dtype == torch.uint8
        return torch.tensor([[1.0, 0, 0, 0]]).expand(len(observations), 4)

    assert play_games(waits, "atari:breakout", 2, 0, greedy=True, most_steps=20).scores == (0, 0)

    steps = 0

    def fires(observations: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return torch.tensor([[0, 1.0, 0, 0]]).expand(len(observations), 4)

    play_games(fires, "atari:breakout", 1, 0, greedy=True)
    assert steps > 100  # five balls at some 30 steps each


def test_actions_are_drawn_by_their_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.6, 0.3])
    act = Actor(lambda x: probabilities.log().expand(len(x), 3), 3, 0, False)
    drawn = np.bincount(act(np.zeros((20_000, 1), np.float32)), minlength=3) / 20_000
    np.testing.assert_allclose(drawn, probabilities, atol=0.012)
    likeliest = Actor(lambda x: probabilities.log().expand(len(x), 3), 3, 0, True)
    assert set(likeliest(np.zeros((50, 1), np.float32)).tolist()) == {1}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda x: torch.zeros(len(x), 6), r"\(2, 6\)"),
        (lambda x: torch.full((len(x), 3), math.nan), "NaN"),
    ],
)
def test_what_cannot_be_played_is_refused(policy, said) -> None:
    with pytest.raises(AnywidthError, match=said):
        play_games(policy, GAME, 2, seed=0, greedy=True)


# ---- recordings ------------------------------------------------------------------------------


def test_a_recorded_game_is_the_one_that_is_scored(network: ActorCritic) -> None:
    seen: list[np.ndarray] = []

    def watched(observations: Tensor) -> Tensor:
        seen.append(observations[0].numpy().copy())
        return network(observations)[0]

    game = record_game(watched, GAME, seed=3, greedy=False)
    assert (game.score,) == play_games(network, GAME, 1, 3, greedy=False).scores
    assert len(game.frames) == len(seen) > 5
    for frame, observation in zip(game.frames, seen, strict=True):
        cells = frame[::16, ::16].any(2)
        assert np.array_equal(cells, observation.any(0))


def test_an_atari_screen_shows_what_the_policy_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    from ale_py.env import AtariEnv

    no_ops = NoOps(monkeypatch)
    chosen: list[int] = []
    chance = np.random.default_rng(0)

    def notes(observations: Tensor) -> Tensor:
        chosen.append(int(chance.integers(4)))
        return torch.eye(4)[chosen[-1:]]

    environment = make_environment("atari:breakout", 1, seed=2)
    environment.reset()
    first = int(no_ops.frames[0])
    game = record_game(notes, "atari:breakout", seed=2, greedy=True, most_steps=100)
    assert len(game.frames) == len(chosen) == 100
    assert game.frames_per_second == 15
    raw = AtariEnv("breakout", frameskip=1, repeat_action_probability=0.0)
    raw.reset(seed=1)
    for _ in range(first):
        raw.step(0)
    assert np.array_equal(raw.ale.getScreenRGB(), game.frames[0])
    for action, frame in zip(chosen, game.frames[1:], strict=False):
        shown = [raw.step(action)[0] for _ in range(4)]
        assert np.array_equal(np.maximum(shown[2], shown[3]), frame)
    assert len({frame.tobytes() for frame in game.frames}) > 50


def moving_square(count: int = 20, height: int = 30, width: int = 40) -> Recording:
    frames = np.zeros((count, height, width, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[5:10, index : index + 5] = (200, 72, 72)
        frame[-4:] = (66, 158, 130)
    return Recording(list(frames), 1.0, 15)


def read_gif(path: Path) -> tuple[list[np.ndarray], list[int]]:
    frames, durations = [], []
    with Image.open(path) as image:
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
            durations.append(image.info["duration"])
    return frames, durations


def test_a_gif_holds_every_frame_exactly(tmp_path: Path) -> None:
    recording = moving_square()
    save_recording(recording, tmp_path / "game.gif")
    frames, durations = read_gif(tmp_path / "game.gif")
    assert len(frames) == 20
    assert frames[0].shape == (240, 320, 3)
    for made, frame in zip(frames, recording.frames, strict=True):
        assert np.array_equal(made, frame.repeat(8, 0).repeat(8, 1))
    assert abs(sum(durations) - 1000 * 20 / 15) <= 10
    assert set(durations) == {60, 70}


def test_a_gif_of_a_pause_lasts_as_long(tmp_path: Path) -> None:
    recording = moving_square()
    slow = Recording([frame for frame in recording.frames for _ in range(3)], 1.0, 15)
    save_recording(slow, tmp_path / "game.gif")
    frames, durations = read_gif(tmp_path / "game.gif")
    assert len(frames) == 20
    assert sum(durations) == 1000 * 60 // 15


def test_a_gif_of_many_colours_comes_close(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    frame = np.stack(np.broadcast_arrays(ramp[:, None], ramp, np.uint8(60)), 2)
    save_recording(Recording([frame, frame[::-1]], 0.0, 10), tmp_path / "game.gif")
    frames, _ = read_gif(tmp_path / "game.gif")
    assert len(frames) == 2
    assert np.abs(frames[0][::5, ::5].astype(int) - frame).mean() < 8


def test_an_mp4_holds_every_frame(tmp_path: Path) -> None:
    recording = moving_square(height=31, width=321)
    save_recording(recording, tmp_path / "game.mp4")
    video = cv2.VideoCapture(str(tmp_path / "game.mp4"))
    assert video.get(cv2.CAP_PROP_FPS) == 15
    frames = []
    while True:
        is_there, frame = video.read()
        if not is_there:
            break
        frames.append(frame[:31, :321, ::-1])
    video.release()
    assert len(frames) == 20
    for made, frame in zip(frames, recording.frames, strict=True):
        assert np.abs(made.astype(int) - frame).mean() < 3


def test_mp4_without_ffmpeg_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(AnywidthError, match="imageio"):
        check_video_path(tmp_path / "game.mp4")


def test_ffmpeg_that_fails_is_quoted(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\necho no such encoder >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    with pytest.raises(AnywidthError, match="encoder"):
        save_recording(moving_square(), tmp_path / "game.mp4")
    assert not (tmp_path / "game.mp4").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match=r"\.mp4"):
        check_video_path(tmp_path / "game.avi")
    with pytest.raises(AnywidthError, match="nowhere"):
        check_video_path(tmp_path / "nowhere" / "game.gif")


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its initial weights, which play as if at random."""
    from anywidth.app.tasks.reinforcement.policies import build_model
    from anywidth.app.tasks.reinforcement.task import ReinforcementSettings

    settings = ReinforcementSettings(environment=GAME, device="cpu")
    folder = tmp_path_factory.mktemp("play") / "run"
    model = build_model(settings, 3, (4, 10, 10))
    state = {"actions": 3, "observation_shape": [4, 10, 10]}
    save_final(Run.create(folder, settings), model, {"steps": 0, **state})
    return folder


@pytest.mark.parametrize("option", ["--out", "--video"])
def test_play_writes_the_game(run: Path, tmp_path: Path, option: str) -> None:
    from anywidth.app.tasks.reinforcement.task import open_trained

    target = tmp_path / "game.gif"
    answer = command("play", run, "--width", 0.5, option, target, "--seed", 4, "--device", "cpu")
    assert answer.code == 0, answer.errors
    model = open_trained(run, "cpu").model
    with aw.at_width(model, 0.5):
        game = record_game(model, GAME, 4, greedy=False)
    assert f"{game.score:g} in {len(game.frames)} steps" in answer.output
    _, durations = read_gif(target)
    assert abs(sum(durations) - 1000 * len(game.frames) / game.frames_per_second) <= 10


def test_greedy_play_is_another_game(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "game.gif"
    shown = []
    for option in ("--greedy", "--sampled", "--greedy"):
        answer = command("play", run, option, "--out", target, "--device", "cpu")
        assert answer.code == 0, answer.errors
        shown.append(target.read_bytes())
    assert shown[0] == shown[2] != shown[1]


def test_play_refuses_what_it_cannot_do(run: Path, tmp_path: Path) -> None:
    answer = command("play", run, "--out", tmp_path / "game.avi")
    assert answer.code == 2
    assert ".mp4" in answer.errors
    answer = command("play", run, "--width", 0.1, "--out", tmp_path / "game.gif")
    assert answer.code == 2
    assert "0.25" in answer.errors
    other = tmp_path / "other"
    Run.create(other, SuperResolutionSettings())
    answer = command("play", other, "--out", tmp_path / "game.gif")
    assert answer.code == 2
    assert "anywidth train rl" in answer.errors


@pytest.fixture(scope="module")
def individual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished I-Net of width 0.25, untrained, in a folder whose name looks like markup."""
    from anywidth.app.tasks.reinforcement.policies import build_model
    from anywidth.app.tasks.reinforcement.task import ReinforcementSettings

    settings = ReinforcementSettings(environment=GAME, device="cpu", method="i", width=0.25)
    folder = tmp_path_factory.mktemp("play") / "a [bold] name of some length, as folders have them"
    model = build_model(settings, 3, (4, 10, 10))
    state = {"actions": 3, "observation_shape": [4, 10, 10]}
    save_final(Run.create(folder, settings), model, {"steps": 0, **state})
    return folder


@pytest.mark.parametrize("options", [(), ("--width", 0.25)])
def test_an_individual_network_plays_at_its_one_width(
    individual: Path, options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    target = individual / "game.gif"
    answer = command("play", individual, *options, "--out", target, "--device", "cpu")
    assert answer.code == 0, answer.errors
    assert "0.25" in answer.output
    assert answer.output.endswith(f"{target}\n")


@pytest.mark.parametrize("width", [0.5, 1.0])
def test_an_individual_network_plays_at_no_other_width(individual: Path, width: float) -> None:
    answer = command("play", individual, "--width", width, "--out", individual / "other.gif")
    assert answer.code == 2
    (line,) = answer.errors.splitlines()
    assert "0.25" in line
    assert not (individual / "other.gif").exists()
