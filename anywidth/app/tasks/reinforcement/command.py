"""`anywidth play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.showing.output import say
from anywidth.app.tasks import command_options as options
from anywidth.measuring.heartbeat import working

MOST_RECORDED = 3_000
"""Default length of a recording: over three minutes of Atari, 300 MB of memory."""


def play(
    run: options.RunFolder,
    width: options.Width = None,
    budget: options.MostTime = None,
    max_macs: options.MostMacs = None,
    max_parameters: options.MostParameters = None,
    channels: options.Channels = None,
    out: Annotated[
        Path, typer.Option("--out", "--video", help="The file to write: .gif, or .mp4 with ffmpeg.")
    ] = Path("game.gif"),
    seed: Annotated[int, typer.Option(help="Seed of the game.")] = 0,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy/--sampled", help="Take the likeliest action, or draw one by its probability."
        ),
    ] = False,
    most_steps: Annotated[
        int, typer.Option(min=1, help="Largest number of steps of the recording.")
    ] = MOST_RECORDED,
    device: options.Device = "auto",
    trust: options.Trust = False,
) -> None:
    """Play a game with a trained network at a width of your choice, and record it.

    The recording is a GIF, or an MP4 video if ffmpeg is installed. Play the same
    --seed at several widths to see what they can do.

    Examples:

      anywidth play runs/rl --width 0.4 --out game.gif

      anywidth play runs/rl --greedy --out best.mp4
    """
    from anywidth.app.showing.spectrum_tables import format_width
    from anywidth.app.tasks.chosen_width import Wanted, opened_at
    from anywidth.app.tasks.reinforcement.environments.recording import (
        check_video_path,
        save_recording,
    )
    from anywidth.app.tasks.reinforcement.playing import record_game

    check_video_path(out)
    wanted = Wanted(width, budget, max_macs, max_parameters, channels)
    trained, chosen = opened_at("reinforcement", run, device, wanted, trust=trust)
    with trained.at(chosen), working(f"playing at width {format_width(chosen)}"):
        game = record_game(
            trained.model,
            trained.settings.environment,
            seed,
            greedy=greedy,
            most_steps=most_steps,
        )
        save_recording(game, out)
    at = f"at width {format_width(chosen)}"
    say(f"Score {game.score:g} in {len(game.frames)} steps {at}. Written: {out}")


COMMAND = play
