"""Ready settings: `anywidth train NAME` uses one, and options change any field.

Each docstring has the command, the time it takes and the result to expect.
"""

from __future__ import annotations

from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings


def rl() -> ReinforcementSettings:
    """US-PPO that plays MinAtar Breakout, for two CPU cores.

    Command: `anywidth train rl`. About two minutes on two idle cores, including the games at five
    widths; mean score 8.6 at width 0.25 and 8.7 at 1.0 (three seeds, `docs/reinforcement.md`).
    Random play scores 0.5, and an ordinary network sliced to 0.25 scores 1.1.
    """
    return ReinforcementSettings(
        environment="minatar:breakout",
        environments=32,
        rollout=32,
        steps=500_000,
        epochs=2,
        batch_size=256,
        learning_rate=2e-3,
        warmup_updates=300,
        entropy_weight=0.03,
        clip=0.2,
        validate_every=40,
        curve_games=16,
        evaluation_games=50,
        checkpoint_every=50,
    )


def rl_breakout() -> ReinforcementSettings:
    """US-PPO that plays BreakoutNoFrameskip-v4 with the paper's network, for a GPU and many cores.

    Command: `anywidth train rl_breakout`. PPO has its authors' settings for Atari, except for a
    short warm-up and twice the entropy, which narrower widths need (`docs/reinforcement.md`). Not
    run to the end here. With `--environments 16 --rollout 64 --steps 3000000`, the last part in
    bfloat16 on a CPU, it scores 84 at width 0.25 and 116 at 1.0; networks trained alone score 16
    and 84 (one seed).
    """
    return ReinforcementSettings(
        environment="atari:breakout",
        environments=8,
        clip_rewards=True,
        divisor=8,
        steps=10_000_000,
        rollout=128,
        epochs=4,
        batch_size=256,
        learning_rate=2.5e-4,
        warmup_updates=500,
        entropy_weight=0.02,
        clip=0.1,
        longest_game=10_000,
        validate_every=240,
        log_every=10,
        checkpoint_every=240,
    )


RECIPES = (rl, rl_breakout)
