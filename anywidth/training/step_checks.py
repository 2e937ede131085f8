"""What a training step can work with: its optimiser, its losses, its norms."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.norm_statistics import MissingStatisticsError, is_switched_norm
from anywidth.training.distillation import WithTargets, soft_cross_entropy

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

# Losses whose second argument is of probabilities, which a network's output is not; what fits.
_OF_LOGITS = "anywidth.soft_cross_entropy"
_OF_EACH_LOGIT = "lambda output, full: F.binary_cross_entropy_with_logits(output, full.sigmoid())"
_NO_DISTILLATIONS: dict[Any, str] = {
    F.cross_entropy: _OF_LOGITS,
    nn.CrossEntropyLoss: _OF_LOGITS,
    F.kl_div: _OF_LOGITS,
    nn.KLDivLoss: _OF_LOGITS,
    F.binary_cross_entropy_with_logits: _OF_EACH_LOGIT,
    nn.BCEWithLogitsLoss: _OF_EACH_LOGIT,
    F.multilabel_soft_margin_loss: _OF_EACH_LOGIT,
    nn.MultiLabelSoftMarginLoss: _OF_EACH_LOGIT,
}


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
        is_other = name == "distill" and (given is None or isinstance(given, WithTargets))
        if isinstance(given, type) or not (callable(given) or is_other):
            shown = given.__name__ if isinstance(given, type) else repr(given)
            hint = f"; did you mean {shown}()?" if isinstance(given, type) else ""
            raise AnywidthError(
                f"{name}={shown}: expected a function of two arguments that returns a scalar, "
                f"such as F.cross_entropy{hint}"
            )
    kinds = (_bare(distill), type(distill))
    better = next((fix for kind, fix in _NO_DISTILLATIONS.items() if kind in kinds), None)
    if better is not None and not _is_of_logarithms(distill):
        raise AnywidthError(
            f"distill={_name(distill)} takes probabilities for its second argument, and would be "
            f"given the full width's output: pass distill={better}"
        )
    if distill is soft_cross_entropy and _is_not_cross_entropy(loss):
        raise AnywidthError(
            f"the loss is {_name(loss)}, but narrower widths would learn by cross entropy with "
            "the full width's logits: pass distill=..., a function of (output, full width's "
            "output) such as F.mse_loss, or distill=None to train all on the targets"
        )


def _is_of_logarithms(distill: Any) -> bool:
    """Whether a divergence takes logarithms of probabilities, which a network may well give."""
    options = distill.keywords if isinstance(distill, functools.partial) else vars(distill)
    return bool(options.get("log_target", False))


def check_first_batch(loss: Any, distill: Any, output: Any, targets: Any) -> None:
    """Refuses what `soft_cross_entropy` would make of outputs that are no logits of one class.

    Nothing else would show it: the narrower widths would learn something, and not what was meant.
    """
    if _bare(distill) is not soft_cross_entropy:
        return
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or not output.numel():
        return
    _check_axis_of_classes(output, targets)
    is_a_number_each = output.dim() == 1 and 1 < targets.numel() == output.numel()
    if is_a_number_each or (not _is_cross_entropy(loss) and _are_no_labels(output, targets)):
        raise AnywidthError(
            f"outputs of shape {tuple(output.shape)} for targets of shape {tuple(targets.shape)}, "
            "which are neither classes nor shares of them that sum to 1, but narrower widths would "
            "learn by cross entropy with the full width's logits: pass distill=..., a function of "
            "(output, full width's output) such as F.mse_loss, or distill=None"
        )


def _check_axis_of_classes(output: Tensor, targets: Tensor) -> None:
    """A language model's (batch, positions, classes) would be distilled over its positions."""
    if output.dim() < 3 or targets.is_floating_point():
        return
    *first, last = output.shape
    if targets.numel() == math.prod(first) != output.numel() // first[1]:
        raise AnywidthError(
            f"logits of shape {tuple(output.shape)} for targets of shape {tuple(targets.shape)} "
            f"have their {last} classes last, and soft_cross_entropy takes axis 1 for them: pass "
            "distill=lambda output, full: anywidth.soft_cross_entropy(output.flatten(0, -2), "
            "full.flatten(0, -2)), or return logits of shape (batch, classes, ...)"
        )


def _are_no_labels(output: Tensor, targets: Tensor) -> bool:
    """Whether there is a target for each output, and they are not shares of classes."""
    if targets.shape != output.shape or targets.dim() < 2:
        return False
    values = targets.float()
    return bool((values < 0).any() or ((values.sum(1) - 1).abs() > 0.01).any())


def _is_cross_entropy(loss: Any) -> bool:
    return _bare(loss) is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


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
