"""Networks trained for one width (I-Nets): built with fewer channels, not sliced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from anywidth.app.tasks.channel_files import channels_from_text
from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.slimming.convert import slimmable
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
    small = extract_quietly(model, alone)
    initialize(small)
    return small, WidthRange(1.0, 1.0, settings.divisor)
