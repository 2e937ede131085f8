"""`anywidth play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.showing.output import console, say
from anywidth.app.tasks.command_options import Device, RunFolder, Width

MOST_RECORDED = 3_000
"""Steps of a recording: over three minutes of Atari, in 300 MB of memory."""


def play(
    run: RunFolder,
    width: Width = None,
    out: Annotated[
        Path, typer.Option("--out", "--video", help="What to write: .gif, or .mp4 with ffmpeg.")
    ] = Path("game.gif"),
    seed: Annotated[int, typer.Option(help="Of the game; another one is another game.")] = 0,
    greedy: Annotated[
        bool, typer.Option("--greedy/--sampled", help="Take the likeliest action, or draw one.")
    ] = False,
    most_steps: Annotated[
        int, typer.Option(min=1, help="A longer game is cut after so many.")
    ] = MOST_RECORDED,
    device: Device = "auto",
) -> None:
    """Play a game with a trained policy at a width of your choice, and record it.

    Example:

      anywidth play runs/rl --width 0.4 --out game.gif
    """
    from anywidth.app.tasks.registry import open_only
    from anywidth.app.tasks.reinforcement.environments.recording import (
        check_video_path,
        save_recording,
    )
    from anywidth.app.tasks.reinforcement.playing import record_game

    check_video_path(out)
    trained = open_only("reinforcement", run, device)
    chosen = trained.chosen(width)
    with trained.at(chosen), console.status(f"Playing at width {chosen}"):
        game = record_game(
            trained.model,
            trained.settings.environment,
            seed,
            greedy=greedy,
            most_steps=most_steps,
        )
        save_recording(game, out)
    say(f"Score {game.score:g} in {len(game.frames)} steps at width {chosen}. Written: {out}")
