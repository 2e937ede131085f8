"""Games: Atari, MinAtar and gymnasium, with one interface."""

from __future__ import annotations

from anywidth.app.tasks.reinforcement.environments.protocol import (
    MOST_STEPS,
    Outcome,
    VectorEnvironment,
)
from anywidth.errors import AnywidthError, packages_for

__all__ = ["MOST_STEPS", "Outcome", "VectorEnvironment", "make_environment"]

FORMS = "atari:breakout (or BreakoutNoFrameskip-v4), minatar:breakout or gym:CartPole-v1"


def make_environment(
    name: str,
    count: int,
    seed: int,
    *,
    training: bool = True,
    threads: int | None = None,
    most_steps: int | None = None,
    rendered: bool = False,
) -> VectorEnvironment:
    """Make `count` environments that step together.

    Args:
        name: "atari:breakout" or any other game of ale-py (BreakoutNoFrameskip-v4 means the same),
            "minatar:breakout" or another of MinAtar's five games, or "gym:" and the name of a
            gymnasium environment with numbered actions.
        count: number of games side by side.
        seed: determines everything random.
        training: in Atari, a lost life counts as an end, which speeds up learning.
        threads: threads for Atari; if not given, one per environment or core.
        most_steps: a game is cut off after this number of steps; if not given, after `MOST_STEPS`,
            or gymnasium's limit for the environment.
        rendered: keep the screen of the first game for `render`.

    Example:
        >>> games = make_environment("minatar:breakout", count=8, seed=0)
        >>> observations = games.reset()
        >>> outcome = games.step(np.zeros(8, np.int64))
    """
    family, colon, game = name.partition(":")
    if not colon and name.endswith("NoFrameskip-v4"):
        family, game = "atari", name
    with packages_for(name, "'anywidth[rl]'"):
        if family == "atari" and game:
            from anywidth.app.tasks.reinforcement.environments.atari import AtariEnvironment

            return AtariEnvironment(
                game,
                count,
                seed,
                training=training,
                threads=threads,
                most_steps=most_steps or MOST_STEPS,
                rendered=rendered,
            )
        if family == "minatar" and game:
            from anywidth.app.tasks.reinforcement.environments.minatar import MinAtarEnvironment

            return MinAtarEnvironment(game, count, seed, most_steps=most_steps or MOST_STEPS)
        if family == "gym" and game:
            from anywidth.app.tasks.reinforcement.environments.gym_vector import GymEnvironment

            return GymEnvironment(game, count, seed, most_steps=most_steps, rendered=rendered)
    raise AnywidthError(f"no environment {name!r}: expected something like {FORMS}")
