"""`anywidth play`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anywidth.app.commands.output import console, say
from anywidth.app.commands.tasks import REINFORCEMENT, open_only
from anywidth.app.showing.results import network_width, shown_width
from anywidth.app.tasks.reinforcement.environments.recording import check_video_path, save_recording
from anywidth.app.tasks.reinforcement.playing import MOST_RECORDED, record_game
from anywidth.slimming.convert import at_width


def play(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run of rl.")],
    width: Annotated[
        float | None, typer.Option(help="The width to play at; the widest if not given.")
    ] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Play a game with a trained policy at a width of your choice, and record it.

    Example:

      anywidth play runs/rl --width 0.4 --out game.gif
    """
    check_video_path(out)
    trained = open_only(REINFORCEMENT, run, device, "plays nothing")
    chosen = network_width(trained, width)
    shown = shown_width(trained, chosen)
    with at_width(trained.model, chosen), console.status(f"Playing at width {shown}"):
        game = record_game(
            trained.model,
            trained.settings.environment,
            seed,
            greedy=greedy,
            most_steps=most_steps,
        )
        save_recording(game, out)
    text = f"Score {game.score:g} in {len(game.frames)} steps at width {shown}. Written: {out}"
    say(text)
