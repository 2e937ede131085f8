"""The network of a classification run, converted, with its initial weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.app.model_spec import load_model
from anywidth.app.tasks.classification.checkpoint_start import (
    load_starting_weights,
    scales_to_zero,
    sort_starting_channels,
)
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.starting_network import built_alone
from anywidth.errors import AnywidthError
from anywidth.models.building import initialize
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.convert import slimmable, track_statistics
from anywidth.slimming.switchable import add_private_affine


def build_model(
    settings: ClassificationSettings,
    classes: int,
    input_shape: tuple[int, int, int],
    *,
    is_new: bool = False,
) -> nn.Module:
    """The converted network of a run, with its initial weights.

    A run that is `is_new` starts as the settings say: from a file, or with branches at zero.
    """
    torch.manual_seed(settings.seed)
    options: dict[str, Any] = {"num_classes": classes}
    if ":" not in settings.model:
        options |= {"in_channels": input_shape[0], "multiplier": settings.multiplier}
        if settings.total_stride is not None:
            options["total_stride"] = settings.total_stride
        if settings.strides is not None:
            options["strides"] = settings.strides
    model = load_model(settings.model, **options)
    example = torch.randn(2, *input_shape)
    # Built for its width, so that its initial weights fit its fan-out.
    model, widths = built_alone(model, example, settings, initialize)
    plan, zeros = None, []
    if is_new and settings.from_checkpoint is not None:
        load_starting_weights(model, settings.from_checkpoint)
        if settings.sort_channels:
            plan = make_plan(model, example)
            sort_starting_channels(model, plan, settings.from_checkpoint)
    if is_new and settings.zero_gamma:
        zeros = scales_to_zero(model, example)
    slimmable(model, plan, widths, example_input=example, average_outputs=settings.average_outputs)
    for name in zeros:
        nn.init.zeros_(model.get_parameter(name))
    if settings.method == "s":
        for width in settings.switches:
            track_statistics(model, width)
        if settings.private_affine:
            add_private_affine(model, settings.switches)
    # In this memory layout convolutions are fastest, also on a CPU.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_logits(model: nn.Module, classes: int, shape: Sequence[int], name: str) -> None:
    """Refuse a network that does not answer with logits, in evaluation or in training."""
    expected = (2, classes)
    for is_training in (False, True):
        twin = copy.deepcopy(model).train(is_training)  # whose statistics may change
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = twin(torch.zeros(2, *shape))
        if not isinstance(found, Tensor) or found.shape != expected:
            shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise AnywidthError(
                f"--model {name}: in {'training' if is_training else 'evaluation'} it returns "
                f"{shown}; expected logits of shape (batch, {classes}), one per class"
            )
