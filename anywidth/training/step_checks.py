"""Checks of the optimizers, losses, norms and batches of training."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.norm_statistics import MissingStatisticsError, norm_record
from anywidth.training.distillation import Distill, ignoring, soft_cross_entropy
from anywidth.training.engine.trees import leaves
from anywidth.training.optimizer_hooks import parameters_of, stepping
from anywidth.training.token_loss import TokenLoss
from anywidth.width import is_number

# Losses whose second argument must be probabilities, which a network's output is not.
_OF_PROBABILITIES = (
    *(F.cross_entropy, F.kl_div, F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss),
    *(nn.CrossEntropyLoss, nn.KLDivLoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss),
)

_WHICH = (
    "a function of (output, full width's output): anywidth.soft_cross_entropy for logits of "
    "classes, lambda output, full: F.binary_cross_entropy_with_logits(output, full.sigmoid()) for "
    "logits of yes or no, F.mse_loss for numbers; or distill=None to train all widths on the "
    "targets"
)


def check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that hold no parameter of the network."""
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise AnywidthError(
                f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer, such as "
                "torch.optim.SGD(model.parameters(), lr=0.05)"
            )
        if isinstance(stepping(optimizer), torch.optim.LBFGS):
            raise AnywidthError(
                "LBFGS computes the loss several times per step, each time at other widths: use an "
                "optimizer that takes a step from one gradient, such as torch.optim.AdamW"
            )
    held = {parameter for optimizer in optimizers for parameter in parameters_of(optimizer)}
    if optimizers and held.isdisjoint(model.parameters()):
        raise AnywidthError(
            f"{type(optimizers[0]).__name__} holds no parameter of this {type(model).__name__}, so "
            "a step would train nothing: make it from model.parameters() of the same network, not "
            "of a copy"
        )


def check_own_steps(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a whole step without an optimizer, or with one that accumulates gradients."""
    if not optimizers:
        raise AnywidthError(
            "SandwichStep was made without an optimizer: call step.backward(inputs, targets), or "
            "make it with one"
        )
    for optimizer in optimizers:  # accelerate's say so
        batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
        if batches > 1:
            raise AnywidthError(
                f"accelerate accumulates gradients over {batches} batches, and step(inputs, "
                "targets) clears them at every batch: call step.backward(inputs, targets, "
                f"scale=1 / {batches}), then optimizer.step() and optimizer.zero_grad()"
            )


def check_share(truth: Any) -> None:
    if not is_number(truth) or not 0 <= truth <= 1:
        raise AnywidthError(f"truth={truth!r}: expected a share from 0 to 1")


def distillation_for(loss: Any, distill: Any) -> Distill | None:
    """The distillation that was asked for or, for `"auto"`, the one that fits the loss."""
    for name, given in (("loss", loss), ("distill", distill)):
        is_other = name == "distill" and given in ("auto", None)
        if isinstance(given, type) or not (callable(given) or is_other):
            shown = given.__name__ if isinstance(given, type) else repr(given)
            hint = f"; did you mean {shown}()?" if isinstance(given, type) else ""
            raise AnywidthError(
                f"{name}={shown}: expected a function of two arguments that returns a scalar, "
                f"such as F.cross_entropy{hint}"
            )
    is_of_probabilities = any(
        kind in _OF_PROBABILITIES for kind in (_bare(distill), type(_bare(distill)))
    )
    if is_of_probabilities and not _options(distill).get("log_target"):
        raise AnywidthError(
            f"distill={_name(distill)} takes probabilities for its second argument, and would be "
            f"given the full width's output: pass distill=..., {_WHICH}"
        )
    if distill == "auto" and isinstance(loss, TokenLoss):
        return loss.distill
    if distill == "auto" and not is_cross_entropy(loss):
        raise AnywidthError(
            f"the loss is {_name(loss)}, which is not known to be a cross entropy over classes, so "
            f"narrower widths need a distillation that fits it: pass distill=..., {_WHICH}"
        )
    if distill == "auto" or (_bare(distill) is soft_cross_entropy and is_cross_entropy(loss)):
        soft = soft_cross_entropy if distill == "auto" else distill
        return ignoring(soft, _options(loss).get("ignore_index", -100))
    return distill


def is_cross_entropy(loss: Any) -> bool:
    """Whether a loss is known to be the mean cross entropy of logits with classes on axis 1."""
    bare, kind = _bare(loss), type(_bare(loss))
    if _options(loss).get("reduction", "mean") != "mean":
        return False
    if bare in (F.cross_entropy, F.nll_loss):  # the latter of logarithms of probabilities
        return True
    if kind.__module__.startswith("timm.loss"):
        return kind.__name__ in ("LabelSmoothingCrossEntropy", "SoftTargetCrossEntropy")
    # A subclass that computes something else is not known.
    return getattr(kind, "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def check_first_batch(distill: Any, output: Tensor, targets: Any) -> None:
    """Refuse `soft_cross_entropy` for a language model's (batch, positions, classes).

    It would distill over the positions, and nothing else would show that.
    """
    if _bare(distill) is not soft_cross_entropy or not isinstance(targets, Tensor):
        return
    if output.dim() < 3 or not output.numel() or targets.is_floating_point():
        return
    *first, last = output.shape
    if targets.numel() == math.prod(first) != output.numel() // first[1]:
        raise AnywidthError(
            f"logits of shape {tuple(output.shape)} for targets of shape {tuple(targets.shape)} "
            f"have their {last} classes last, and soft_cross_entropy takes axis 1 for them: pass "
            "loss=anywidth.TokenLoss(shift=...), or return logits of shape (batch, classes, ...)"
        )


def _bare(loss: Any) -> Any:
    return _bare(loss.func) if isinstance(loss, functools.partial) else loss


def _options(loss: Any) -> Mapping[str, Any]:
    """The options of a loss: the keywords of a partial function, or a module's attributes."""
    if isinstance(loss, functools.partial):
        return {**_options(loss.func), **loss.keywords}
    return vars(loss) if isinstance(loss, nn.Module) else {}


def _name(loss: Any) -> str:
    return getattr(_bare(loss), "__name__", type(loss).__name__)


@contextlib.contextmanager
def frozen_norms_named(model: nn.Module) -> Iterator[None]:
    """Explain missing statistics by their cause: a norm that is not in training mode."""
    try:
        yield
    except MissingStatisticsError as error:
        modules = model.named_modules()
        frozen = next((path for path, m in modules if norm_record(m) and not m.training), None)
        if frozen is None:
            raise
        raise AnywidthError(
            f"{error}. A step needs them because {frozen!r} is in evaluation mode: call "
            "model.train(), or train calibrated widths alone, with "
            'Sampling("fixed", widths=(0.25, 0.5, 1.0))'
        ) from error


@contextlib.contextmanager
def inputs_kept(inputs: Any) -> Iterator[None]:
    """Refuse a network that changes its input in place: the next width would get what it left.

    PyTorch counts the changes of a tensor, so this costs nothing and waits for no device.
    """
    tensors = [x for x in leaves(inputs) if isinstance(x, Tensor) and not x.is_inference()]
    before = [tensor._version for tensor in tensors]
    yield
    if [tensor._version for tensor in tensors] != before:
        raise AnywidthError(
            "the network changes its input in place, and several widths run on the same batch: "
            "each would get what the one before has left. Write x = x - mean instead of x -= mean "
            "or x.sub_(mean) in its forward, and inplace=False in a first layer"
        )
