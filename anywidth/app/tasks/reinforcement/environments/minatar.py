"""MinAtar: five Atari games on a board of 10 by 10 cells, learned on a CPU in a minute."""

from __future__ import annotations

import colorsys
import contextlib
import signal
from collections.abc import Iterator

import numpy as np

from anywidth.app.interrupts import handled_by
from anywidth.app.tasks.reinforcement.environments import Outcome, VectorEnvironment
from anywidth.errors import AnywidthError


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block."""
    arrived: list[int] = []
    try:
        with handled_by(lambda number, frame: arrived.append(number), [signal.SIGINT]):
            yield
    finally:
        if arrived:
            signal.raise_signal(signal.SIGINT)


# It imports matplotlib under a bare `except:`, which would swallow Ctrl-C for about a second.
with _interrupts_held_back():
    from minatar import Environment

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
CELL_PIXELS = 16


class MinAtarEnvironment(VectorEnvironment):
    """Games with MinAtar's defaults: a tenth of the actions is replaced by the previous one.

    Observations are 0 or 1 in float32, with one channel per kind of object. Only those of the six
    actions that have an effect in the game are offered.
    """

    frames_per_second = 12

    def __init__(self, game: str, count: int, seed: int, *, most_steps: int) -> None:
        if game not in GAMES:
            raise AnywidthError(f"no MinAtar game {game!r}: expected one of {', '.join(GAMES)}")
        self._games = [Environment(game) for _ in range(count)]
        self._meanings = np.array(self._games[0].minimal_action_set())
        self._most_steps = most_steps
        self._steps = np.zeros(count, np.int64)
        height, width, channels = self._games[0].state_shape()
        self._cells = np.zeros((count, height, width, channels), bool)
        super().__init__(count, seed, len(self._meanings), (channels, height, width))

    def reset(self) -> np.ndarray:
        self._scores[:] = 0
        self._steps[:] = 0
        for index, (game, seed) in enumerate(zip(self._games, self._seeds.tolist(), strict=True)):
            game.seed(seed)
            game.last_action = 0
            game.reset()
            self._cells[index] = game.state()
        return self._observations()

    def step(self, actions: np.ndarray) -> Outcome:
        meant = self._meanings[actions].tolist()
        rewards = np.zeros(self.count, np.float32)
        self._steps += 1
        finished = self._steps >= self._most_steps
        for index, game in enumerate(self._games):
            rewards[index], is_over = game.act(meant[index])
            if is_over or finished[index]:
                finished[index] = True
                game.reset()
            self._cells[index] = game.state()
        self._steps[finished] = 0
        scores = self._scores_of(rewards, finished)
        return Outcome(self._observations(), rewards, finished, scores, finished)

    def render(self) -> np.ndarray:
        return paint(self._cells[0])

    def _observations(self) -> np.ndarray:
        return np.ascontiguousarray(self._cells.transpose(0, 3, 1, 2), dtype=np.float32)


def paint(cells: np.ndarray) -> np.ndarray:
    """A board of (height, width, channels) as RGB: black, and one colour per channel.

    If two objects share a cell, the later channel is shown, as in MinAtar's own display.
    """
    channels = cells.shape[2]
    colors = [colorsys.hls_to_rgb(0.55 + index / channels, 0.6, 0.8) for index in range(channels)]
    palette = np.round(255 * np.array([(0.0, 0.0, 0.0), *colors])).astype(np.uint8)
    seen = (cells * np.arange(1, channels + 1)).max(2)
    return palette[seen].repeat(CELL_PIXELS, 0).repeat(CELL_PIXELS, 1)
