"""Networks trained alone at one width (I-Nets): built for it, not cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from anywidth.app.tasks.task_settings import TaskSettings
from anywidth.slimming.convert import slimmable
from anywidth.slimming.extraction import extract_quietly
from anywidth.width import WidthRange


def built_alone(
    model: nn.Module, example: Tensor, settings: TaskSettings, initialize: Callable[[Any], object]
) -> tuple[nn.Module, WidthRange]:
    """The network to convert, and its widths; an I-Net's smaller one with fresh weights."""
    if settings.method != "i" or settings.width == 1:
        return model, settings.width_range
    wide = WidthRange(min(settings.low, settings.width), 1.0, settings.divisor)
    slimmable(model, None, wide, example_input=example, verified=False)
    small = extract_quietly(model, settings.width)
    initialize(small)
    return small, WidthRange(1.0, 1.0, settings.divisor)
