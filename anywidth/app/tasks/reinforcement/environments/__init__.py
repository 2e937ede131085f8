"""Games to learn: Atari, MinAtar and gymnasium's, all behind one interface."""

from __future__ import annotations

from anywidth.app.tasks.reinforcement.environments.protocol import (
    MOST_STEPS,
    Outcome,
    SteppingAlone,
    VectorEnvironment,
)
from anywidth.errors import AnywidthError

__all__ = ["MOST_STEPS", "Outcome", "SteppingAlone", "VectorEnvironment", "make_environment"]

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
    """Makes `count` environments that are stepped together.

    Args:
        name: "atari:breakout" or any other game that ale-py holds (BreakoutNoFrameskip-v4 means
            the same), "minatar:breakout" or another of MinAtar's five, or "gym:" and the name of an
            environment of gymnasium with numbered actions.
        count: how many games are played side by side.
        seed: everything random follows from it.
        training: a lost life in Atari counts as an end, which speeds up learning.
        threads: that step Atari; if not given, one an environment or a core.
        most_steps: a game is cut after that many; if not given, after `MOST_STEPS`, or what
            gymnasium says of an environment.
        rendered: keeps the first game's screen for `render`.

    Example:
        >>> games = make_environment("minatar:breakout", count=8, seed=0)
        >>> observations = games.reset()
        >>> outcome = games.step(np.zeros(8, np.int64))
    """
    counts = {"count": count, "threads": threads, "most_steps": most_steps}
    for option, value in counts.items():
        allowed = value is None and option != "count"
        if not allowed and (not isinstance(value, int) or value < 1):
            raise AnywidthError(f"{option}={value!r}: expected a whole number of at least 1")
    family, colon, game = name.partition(":")
    if not colon and name.endswith("NoFrameskip-v4"):
        family, game = "atari", name
    try:
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
    except ModuleNotFoundError as error:
        raise AnywidthError(
            f"{name} needs the package {error.name!r}: install it with pip install 'anywidth[rl]'"
        ) from error
    raise AnywidthError(f"no environment {name!r}: expected something like {FORMS}")
