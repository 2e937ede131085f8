"""How a classification network is optimised: SGD, and the losses of its widths."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from anywidth.app.runs.loop import RATE_SHARE
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.training.distillation import Distill, soft_cross_entropy
from anywidth.training.step import Loss

PRECISIONS: dict[str, torch.dtype | Literal["auto"] | None] = {
    "auto": "auto",
    "float32": None,
    "bfloat16": torch.bfloat16,
}
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def make_optimizer(model: nn.Module, settings: ClassificationSettings) -> torch.optim.Optimizer:
    """SGD; weight decay on linear weights and on convolutions that are not depthwise.

    The last layer, the classifier of most networks, may have its own learning rate.
    """
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {
        (settings.weight_decay, 1.0): [],
        (0.0, 1.0): [],
    }
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        share = settings.head_rate if layers and module is layers[-1] else 1.0
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:  # tied: it belongs to the first module that has it
                continue
            seen.add(parameter)
            is_depthwise = isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels
            is_decayed = isinstance(module, _LAYERS) and name == "weight" and not is_depthwise
            decay = settings.weight_decay if is_decayed else 0.0
            groups.setdefault((decay, share), []).append(parameter)
    return torch.optim.SGD(
        [
            {"params": parameters, "weight_decay": decay, RATE_SHARE: share}
            for (decay, share), parameters in groups.items()
            if parameters
        ],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        fused=all(parameter.is_cuda for parameter in model.parameters()) or None,
    )


def loss_of(settings: ClassificationSettings) -> Loss:
    return partial(F.cross_entropy, label_smoothing=settings.label_smoothing)


def distillation_of(settings: ClassificationSettings) -> Distill | None:
    """The loss of narrower widths besides the true labels, whose share is `truth`."""
    if settings.method != "us" or "distill" in settings.unread() or not settings.distill:
        return None
    return partial(soft_cross_entropy, temperature=settings.temperature)
