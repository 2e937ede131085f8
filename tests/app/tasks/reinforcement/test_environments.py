"""Environments: frames as gymnasium makes them, true scores, lost lives, seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import minatar
import numpy as np
import pytest
from atari_reference import NoOps, Reference

from anywidth.app.tasks.reinforcement.environments import (
    Outcome,
    VectorEnvironment,
    environment_seeds,
    make_environment,
)
from anywidth.app.tasks.reinforcement.environments.atari import rom_name
from anywidth.app.tasks.reinforcement.environments.minatar import GAMES, paint
from anywidth.errors import AnywidthError

FIRE = 1


def random_steps(environment: VectorEnvironment, steps: int, seed: int = 0) -> list[Outcome]:
    chance = np.random.default_rng(seed)
    return [
        environment.step(chance.integers(0, environment.actions, environment.count))
        for _ in range(steps)
    ]


def assert_same(ones: list[Outcome], others: list[Outcome]) -> None:
    for one, other in zip(ones, others, strict=True):
        for name in ("observations", "rewards", "ends", "finished"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert one.scores == other.scores


# ---- Atari -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "steps", "most_reward"), [("breakout", 400, 1), ("space_invaders", 500, 30)]
)
def test_atari_frames_equal_those_of_gymnasium(
    game: str, steps: int, most_reward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_ops = NoOps(monkeypatch)
    environment = make_environment(f"atari:{game}", 2, seed=3, threads=1)
    references = [Reference(game) for _ in range(2)]
    for reference in references:
        reference.raw.reset(seed=1)
    first = environment.reset()
    for index, reference in enumerate(references):
        assert np.array_equal(reference.reset(int(no_ops.frames[index])), first[index])
    lost = games = most = 0
    scores = np.zeros(2)
    for actions in np.random.default_rng(0).integers(0, environment.actions, (steps, 2)):
        outcome = environment.step(actions)
        finished = iter(outcome.scores)
        for index, reference in enumerate(references):
            lives = reference.raw.ale.lives()
            observation, reward, is_over = reference.step(int(actions[index]))
            has_lost = reference.raw.ale.lives() < lives
            scores[index] += reward
            assert outcome.rewards[index] == reward
            assert outcome.finished[index] == is_over
            assert outcome.ends[index] == (is_over or has_lost)
            if is_over:
                assert next(finished) == scores[index]
                scores[index] = 0
                observation = reference.reset(int(no_ops.frames[index]))
            assert np.array_equal(outcome.observations[index], observation)
            lost += has_lost
            games += is_over
            most = max(most, int(reward))
        assert next(finished, None) is None
    assert games >= 1
    assert lost > 2 * games
    assert most == most_reward


def test_a_game_of_breakout_has_five_lives_and_one_score() -> None:
    environment = make_environment("atari:breakout", 2, seed=0, threads=1)
    assert environment.actions == 4
    assert environment.reset().shape == (2, 4, 84, 84)
    outcomes = random_steps(environment, 500)
    finished = np.stack([outcome.finished for outcome in outcomes])
    ends = np.stack([outcome.ends for outcome in outcomes])
    rewards = np.stack([outcome.rewards for outcome in outcomes])
    assert finished.any(0).all()
    for index in range(2):
        over = np.flatnonzero(finished[:, index])
        found = [
            outcome.scores[int(outcome.finished[:index].sum())]
            for outcome in outcomes
            if outcome.finished[index]
        ]
        for start, stop, score in zip([0, *(over[:-1] + 1)], over + 1, found, strict=True):
            assert ends[start:stop, index].sum() == 5
            assert rewards[start:stop, index].sum() == score
    assert sum(sum(outcome.scores) for outcome in outcomes) > 0
    assert rewards.dtype == np.float32


def test_a_lost_life_is_an_end_in_training_alone() -> None:
    training, evaluation = (
        make_environment("atari:breakout", 2, seed=5, training=training, threads=1)
        for training in (True, False)
    )
    assert np.array_equal(training.reset(), evaluation.reset())
    ones, others = random_steps(training, 200), random_steps(evaluation, 200)
    for one, other in zip(ones, others, strict=True):
        assert np.array_equal(one.observations, other.observations)
        assert np.array_equal(other.ends, other.finished)
    assert sum(outcome.ends.sum() for outcome in ones) > sum(o.ends.sum() for o in others)


def test_games_of_breakout_begin_with_different_balls() -> None:
    environment = make_environment("atari:breakout", 1, seed=0, most_steps=12, threads=1)
    environment.reset()
    leftwards = []
    for _ in range(8):
        environment.step(np.array([FIRE]))
        seen = [environment.step(np.array([0])).observations[0, -1] for _ in range(11)]
        # Between the bricks and the paddle there is only the ball.
        columns = [frame[40:75, 5:79].any(0).nonzero()[0] for frame in seen[2:9]]
        leftwards.append(bool(columns[-1].mean() < columns[0].mean()))
    assert 0 < sum(leftwards) < 8


def test_no_more_than_30_frames_pass_before_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    no_ops = NoOps(monkeypatch)
    environment = make_environment("atari:pong", 2, seed=0, most_steps=1, threads=1)
    environment.reset()
    found = set()
    for _ in range(100):
        environment.step(np.zeros(2, np.int64))
        found |= set(no_ops.frames.tolist())
    assert found == set(range(31))


def test_atari_follows_its_seed_however_many_threads_step_it() -> None:
    runs = []
    for seed, threads in ((7, 1), (7, 2), (8, 1)):
        environment = make_environment("atari:breakout", 2, seed, threads=threads)
        environment.reset()
        runs.append(random_steps(environment, 30))
    assert_same(runs[0], runs[1])
    assert not np.array_equal(runs[0][-1].observations, runs[2][-1].observations)


def test_send_and_receive_are_the_halves_of_step() -> None:
    whole, halves = (make_environment("atari:breakout", 2, seed=0, threads=1) for _ in range(2))
    assert np.array_equal(whole.reset(), halves.reset())
    for outcome in random_steps(whole, 5):
        assert outcome.observations.dtype == np.uint8
    chance = np.random.default_rng(0)
    for _ in range(5):
        halves.send(chance.integers(0, 4, 2))  # type: ignore[attr-defined]
        last = halves.receive()  # type: ignore[attr-defined]
    assert np.array_equal(last.observations, outcome.observations)
    halves.send(np.zeros(2, np.int64))  # type: ignore[attr-defined]
    assert np.array_equal(halves.reset(), whole.reset())


@pytest.mark.parametrize("game", ["breakout", "Breakout", "BreakoutNoFrameskip-v4"])
def test_a_game_has_several_names(game: str) -> None:
    assert rom_name(game) == "breakout"
    assert rom_name("MsPacmanNoFrameskip-v4") == "ms_pacman"
    assert make_environment(f"atari:{game}", 1, seed=0).observation_shape == (4, 84, 84)


# ---- MinAtar ---------------------------------------------------------------------------------


@pytest.mark.parametrize("game", GAMES)
def test_minatar_is_the_package_stepped_alone(game: str) -> None:
    environment = make_environment(f"minatar:{game}", 3, seed=4)
    observations = environment.reset()
    assert observations.dtype == np.float32
    assert observations.shape == (3, *environment.observation_shape)
    outcomes = random_steps(environment, 300)
    chance = np.random.default_rng(0)
    actions = [chance.integers(0, environment.actions, 3) for _ in outcomes]
    for index, seed in enumerate(environment_seeds(4, 3)):
        alone = minatar.Environment(game)
        alone.seed(int(seed))
        alone.reset()
        score = 0
        for outcome, chosen in zip(outcomes, actions, strict=True):
            reward, is_over = alone.act(alone.minimal_action_set()[chosen[index]])
            score += reward
            assert outcome.rewards[index] == reward
            assert outcome.finished[index] == outcome.ends[index] == is_over
            if is_over:
                assert outcome.scores[int(outcome.finished[:index].sum())] == score
                score = 0
                alone.reset()
            assert np.array_equal(outcome.observations[index], alone.state().transpose(2, 0, 1))


def test_a_board_is_painted_a_colour_a_channel() -> None:
    cells = np.zeros((10, 10, 3), bool)
    cells[0, 0, 0] = cells[0, 1, 1] = cells[9, 9, 2] = True
    cells[9, 9, 0] = True
    picture = paint(cells)
    assert picture.shape == (160, 160, 3)
    corners = picture[[0, 0, 159, 80], [0, 16, 159, 80]]
    assert len(np.unique(corners, axis=0)) == 4
    assert not corners[3].any()
    shown = make_environment("minatar:breakout", 2, seed=0)
    shown.reset()
    random_steps(shown, 2)
    assert len(np.unique(shown.render().reshape(-1, 3), axis=0)) == 5


# ---- gymnasium -------------------------------------------------------------------------------


def test_cartpole_is_gymnasiums_stepped_alone() -> None:
    environment = make_environment("gym:CartPole-v1", 2, seed=1)
    assert (environment.actions, environment.observation_shape) == (2, (4,))
    observations = environment.reset()
    outcomes = random_steps(environment, 120)
    chance = np.random.default_rng(0)
    actions = [chance.integers(0, 2, 2) for _ in outcomes]
    for index, seed in enumerate(environment_seeds(1, 2)):
        alone = gymnasium.make("CartPole-v1")
        first, _ = alone.reset(seed=int(seed))
        assert np.array_equal(observations[index], first)
        steps = 0
        for outcome, chosen in zip(outcomes, actions, strict=True):
            observation, _, terminated, truncated, _ = alone.step(int(chosen[index]))
            steps += 1
            assert outcome.finished[index] == (terminated or truncated)
            if outcome.finished[index]:
                assert outcome.scores[int(outcome.finished[:index].sum())] == steps
                steps = 0
                observation, _ = alone.reset()
            assert np.array_equal(outcome.observations[index], observation)
        alone.close()
    assert sum(outcome.finished.sum() for outcome in outcomes) >= 4


# ---- all of them -----------------------------------------------------------------------------

ALL = ["atari:breakout", "minatar:breakout", "gym:CartPole-v1"]


@pytest.mark.parametrize("name", ALL)
def test_a_reset_starts_from_the_seed_again(name: str) -> None:
    environment = make_environment(name, 2, seed=11, threads=1)
    first = environment.reset()
    ones = random_steps(environment, 40)
    assert np.array_equal(environment.reset(), first)
    assert_same(ones, random_steps(environment, 40))
    environment.close()


@pytest.mark.parametrize("name", ALL)
def test_a_long_game_is_cut(name: str) -> None:
    environment = make_environment(name, 2, seed=0, most_steps=3, threads=1)
    environment.reset()
    outcomes = random_steps(environment, 6)
    assert [outcome.finished.tolist() for outcome in outcomes] == 2 * [
        [False, False],
        [False, False],
        [True, True],
    ]
    assert outcomes[2].ends.all()
    assert [len(outcome.scores) for outcome in outcomes] == [0, 0, 2, 0, 0, 2]
    environment.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breakout", "minatar:breakout"),
        ("atari:", "'atari:'"),
        ("atari:braekout", "space_invaders"),
        ("minatar:pong", "seaquest"),
        ("gym:NoSuchGame-v1", "NoSuchGame"),
        ("gym:GymV21Environment-v0", "shimmy"),
        ("gym:phys2d/CartPole-v1", "jax"),
        ("gym:Pendulum-v1", "actions"),
    ],
)
def test_what_does_not_exist_is_named(name: str, said: str) -> None:
    with pytest.raises(AnywidthError, match=said):
        make_environment(name, 2, seed=0)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("atari:breakout", "atari", "ale_py"),
        ("minatar:breakout", "minatar", "minatar"),
        ("gym:CartPole-v1", "gym_vector", "gymnasium"),
    ],
)
def test_a_missing_package_is_named(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(
        sys.modules, f"anywidth.app.tasks.reinforcement.environments.{module}", raising=False
    )
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AnywidthError, match=package):
        make_environment(name, 1, seed=0)


def test_ctrl_c_while_minatar_is_imported_takes_effect(tmp_path: Path) -> None:
    """It imports matplotlib under a bare `except:`."""
    (tmp_path / "minatar.py").write_text(
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept: pass\nEnvironment = None\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    # Where the tests run in the background, the system has it ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import anywidth.app.tasks.reinforcement.environments.minatar; print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert done.stdout == ""
