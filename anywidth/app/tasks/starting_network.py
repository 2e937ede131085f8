"""The network that a training starts with: built for one width (I-Nets), or with known weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from anywidth.app.runs.run import Run
from anywidth.app.tasks.channel_files import channels_from_text, check_within
from anywidth.app.tasks.registry import open_trained
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.errors import AnywidthError, errors_about
from anywidth.slimming.convert import plan_of, slimmable
from anywidth.slimming.extraction import extract_quietly
from anywidth.width import Width, WidthRange


def built_alone(
    model: nn.Module, example: Tensor, settings: TaskSettings, initialize: Callable[[Any], object]
) -> tuple[nn.Module, WidthRange]:
    """The network to convert, and its widths; for an I-Net a smaller one with new weights."""
    alone: Width = settings.width
    if settings.own_channels is not None:
        alone = channels_from_text(settings.own_channels)
    if settings.method != "i" or alone == 1:
        return model, settings.width_range
    wide = WidthRange(min(settings.low, settings.width), 1.0, settings.divisor)
    slimmable(model, None, wide, example_input=example, verified=False)
    cure = "the settings of the run that was searched are taken with --config RUN/config.json"
    with errors_about("--channels", cure) if settings.own_channels else nullcontext():
        small = extract_quietly(model, alone)
    initialize(small)
    return small, WidthRange(1.0, 1.0, settings.divisor)


def start_with_weights(run: Run, model: nn.Module, settings: TaskSettings) -> None:
    """Give a new network the weights of the run `from_run`, cut to its channels.

    A run that goes on has its own weights, and the other run may be gone.
    """
    if settings.from_run is None or run.load_checkpoint() is not None:
        return
    folder = Path(settings.from_run)
    # Whoever names a network that is code has allowed it for this run.
    named = getattr(settings, "model", None) if settings.named_code() is not None else None
    source = open_trained(folder, "cpu", with_data=False, model=named)
    if source.settings.task != settings.task:
        raise AnywidthError(
            f"--from-run {folder}: a run of {source.settings.task}; expected one of {settings.task}"
        )
    plan = plan_of(source.model)
    width: Width = plan.full
    if settings.own_channels is not None:
        width = check_within(
            channels_from_text(settings.own_channels), plan, f"--from-run {folder}"
        )
    elif settings.method == "i":
        width = source.own_width(settings.width)
    weights = extract_quietly(source.model, width).state_dict()
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if own != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise AnywidthError(
            f"--from-run {folder}: its network is another one; train with the same network and "
            "data set"
        )
    model.load_state_dict(weights)
