"""What a training step can work with: its optimiser, its losses, its norms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from anywidth.distillation import soft_cross_entropy
from anywidth.errors import AnywidthError
from anywidth.layers import MissingStatisticsError, is_switched_norm

# What networks learn by whose outputs are no logits of classes of which one is right.
_OTHER_LOSSES = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss),
    *(F.multilabel_soft_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss),
)
_OTHER_LOSS_MODULES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss),
    *(nn.MultiLabelSoftMarginLoss, nn.MultiLabelMarginLoss, nn.CosineEmbeddingLoss),
)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """It must hold some of the network's parameters: others may be frozen, or a loss's own."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise AnywidthError(
            f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.05)"
        )
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise AnywidthError(
            f"{type(optimizer).__name__} holds no parameter of this {type(model).__name__}, so a "
            "step would train nothing: make it from model.parameters() of the same network, not "
            "of a copy"
        )


def check_losses(loss: Any, distill: Any) -> None:
    for name, given in (("loss", loss), ("distill", distill)):
        is_optional = name == "distill" and given is None
        if isinstance(given, type) or not (callable(given) or is_optional):
            shown = given.__name__ if isinstance(given, type) else repr(given)
            hint = f"; did you mean {shown}()?" if isinstance(given, type) else ""
            raise AnywidthError(
                f"{name}={shown}: expected a function of two arguments that returns a scalar, "
                f"such as F.cross_entropy{hint}"
            )
    if distill is soft_cross_entropy and _is_not_cross_entropy(loss):
        raise AnywidthError(
            f"the loss is {_name(loss)}, but narrower widths would learn by cross entropy with "
            "the full width's logits: pass distill=..., a function of (output, full width's "
            "output) such as F.mse_loss, or distill=None to train all on the targets"
        )


def _is_not_cross_entropy(loss: Any) -> bool:
    return _bare(loss) in _OTHER_LOSSES or isinstance(loss, _OTHER_LOSS_MODULES)


def _bare(loss: Any) -> Any:
    return _bare(loss.func) if isinstance(loss, functools.partial) else loss


def _name(loss: Any) -> str:
    return getattr(_bare(loss), "__name__", type(loss).__name__)


@contextlib.contextmanager
def frozen_norms_named(model: nn.Module) -> Iterator[None]:
    """Says of missing statistics what is behind them: a norm that is not in training mode."""
    try:
        yield
    except MissingStatisticsError as error:
        norms = [(path, m) for path, m in model.named_modules() if is_switched_norm(m)]
        frozen = next((path for path, norm in norms if not norm.training), None)
        if frozen is None:
            raise
        raise AnywidthError(
            f"{error}. A step needs them because {frozen!r} is in evaluation mode: call "
            "model.train(), or train calibrated widths alone, with "
            'Sampling("fixed", widths=(0.25, 0.5, 1.0))'
        ) from error
