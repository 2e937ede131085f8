"""Atari games with the usual preprocessing, stepped by ale-py's own threads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

from anywidth.app.tasks.reinforcement.environments import Outcome, VectorEnvironment
from anywidth.errors import AnywidthError, did_you_mean

FRAME_SKIP = 4
MOST_NO_OPS = 30
SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}


class AtariEnvironment(VectorEnvironment):
    """Games of one ROM: an action lasts 4 frames, an observation is the last 4 such steps.

    Each of the 4 is the maximum of two frames, grey, 84x84; before the first step of a game they
    are zero. A game starts after up to 30 frames without action. Actions are never repeated at
    random. The policy must press FIRE itself: ale-py could press it at the start, but before these
    frames, so every game of Breakout would start with the same ball.
    """

    frames_per_second = 60 // FRAME_SKIP

    def __init__(
        self,
        game: str,
        count: int,
        seed: int,
        *,
        training: bool,
        threads: int | None,
        most_steps: int,
        rendered: bool,
    ) -> None:
        rom = rom_name(game)
        self._games = _games(rom, count, most_steps, num_threads=threads or 0)
        # The same game a second time, in colour, with the same seed and actions.
        self._screen = _games(rom, 1, most_steps, num_threads=1, **SCREEN) if rendered else None
        self._frame: np.ndarray | None = None
        self._lives = np.zeros(count, np.int32)
        self._ends_at_lost_life = training
        self._is_stepping = False
        super().__init__(count, seed, len(self._games.ale.get_action_set()), (4, 84, 84))

    def reset(self) -> np.ndarray:
        if self._is_stepping:
            self.receive()
        observations, info = self._games.reset(seed=self._seeds)
        self._lives = info["lives"]
        self._scores[:] = 0
        if self._screen is not None:
            self._frame = self._screen.reset(seed=self._seeds[:1])[0][0, 0]
        return observations

    def step(self, actions: np.ndarray) -> Outcome:
        self.send(actions)
        return self.receive()

    def send(self, actions: np.ndarray) -> None:
        self._games.send(actions)
        self._is_stepping = True
        if self._screen is not None:
            self._frame = self._screen.step(actions[:1])[0][0, 0]

    def receive(self) -> Outcome:
        observations, rewards, terminated, truncated, info = self._games.recv()
        self._is_stepping = False
        finished = terminated | truncated
        ends = finished
        if self._ends_at_lost_life:
            ends = finished | (info["lives"] < self._lives)
        self._lives = info["lives"]
        scores = self._scores_of(rewards, finished)
        return Outcome(observations, rewards.astype(np.float32), ends, scores, finished)

    def render(self) -> np.ndarray:
        assert self._frame is not None
        return self._frame

    def close(self) -> None:
        self._games.close()
        if self._screen is not None:
            self._screen.close()


def rom_name(game: str) -> str:
    """ale-py's name of a game: "breakout" for breakout, Breakout and BreakoutNoFrameskip-v4."""
    wanted = re.sub(r"(NoFrameskip)?(-v4)?$", "", game)
    known = {rom.replace("_", ""): rom for rom in roms.get_all_rom_ids()}
    found = known.get(wanted.replace("_", "").lower())
    if found is None:
        meant = did_you_mean(wanted.lower(), known.values())
        raise AnywidthError(
            f"no Atari game {game!r}{meant}: expected one of {', '.join(sorted(known.values()))}"
        )
    return found


def _games(rom: str, count: int, most_steps: int, **options: Any) -> AtariVectorEnv:
    return AtariVectorEnv(
        rom,
        count,
        frameskip=FRAME_SKIP,
        max_num_frames_per_episode=most_steps * FRAME_SKIP,
        noop_max=MOST_NO_OPS + 1,  # ale-py draws numbers below this
        use_fire_reset=False,
        reward_clipping=False,
        repeat_action_probability=0.0,
        autoreset_mode="SameStep",
        **options,
    )
