"""The loss of language models: classes last, next tokens, padding ignored at every width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.training.distillation import soft_cross_entropy


@dataclass(frozen=True)
class TokenLoss:
    """The cross entropy of a language model: logits of shape (batch, positions, classes).

    With it, `SandwichStep` distills narrower widths over the classes at the same positions: those
    whose target is not `ignore_index`. The network may return its logits, or a Hugging Face output
    that has them.

    Args:
        shift: True if the targets are the input tokens (Hugging Face's `labels`): the logits at a
            position then predict the target at the next one. False if each target is at the
            position that predicts it, as in masked language models.
        ignore_index: targets with this value, such as padding, do not count.

    Example:
        >>> labels = tokens.masked_fill(attention_mask == 0, -100)
        >>> step = anywidth.SandwichStep(model, optimizer, anywidth.TokenLoss(shift=True))
        >>> step({"input_ids": tokens, "attention_mask": attention_mask}, labels)
    """

    shift: bool
    ignore_index: int = -100

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        logits, wanted = self._aligned(output, targets)
        return F.cross_entropy(logits, wanted, ignore_index=self.ignore_index)

    def distill(self, output: Any, full: Any, *, targets: Tensor) -> Tensor:
        """The cross entropy with the full width's soft labels, over the same positions."""
        logits, wanted = self._aligned(output, targets)
        teacher, _ = self._aligned(full, targets)
        return soft_cross_entropy(logits, teacher, kept=wanted != self.ignore_index)

    def _aligned(self, output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of shape (tokens, classes), and the target of each."""
        logits = _logits_in(output)
        if not isinstance(targets, Tensor) or logits.shape[:-1] != targets.shape:
            found = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise AnywidthError(
                f"TokenLoss: targets of shape {found} for logits of shape {tuple(logits.shape)}: "
                "expected one target per position, (batch, positions)"
            )
        if self.shift:
            logits, targets = logits[..., :-1, :], targets[..., 1:]
        return logits.flatten(0, -2), targets.flatten()

    def check_shift(self, inputs: Any, targets: Any) -> None:
        """Refuse targets that do not fit `shift`: the network would learn to copy its input."""
        tokens = _tokens_in(inputs)
        if not isinstance(targets, Tensor) or tokens is None or tokens.shape != targets.shape:
            return
        are_same = self._are_equal(tokens, targets)
        if are_same and not self.shift:
            raise AnywidthError(
                "TokenLoss(shift=False): the targets are the input tokens themselves, so the "
                "network would learn to repeat its input: pass TokenLoss(shift=True)"
            )
        if self.shift and not are_same and self._are_equal(tokens[..., 1:], targets[..., :-1]):
            raise AnywidthError(
                "TokenLoss(shift=True): the targets are the next tokens already, so the network "
                "would learn to predict the token after the next: pass TokenLoss(shift=False)"
            )

    def _are_equal(self, tokens: Tensor, targets: Tensor) -> bool:
        kept = targets != self.ignore_index
        return bool(kept.any()) and bool((tokens == targets)[kept].all())


def _logits_in(output: Any) -> Tensor:
    """The logits that a network returns alone, by name, or first of several."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise AnywidthError(
            f"TokenLoss: the network returned {type(output).__name__} without logits: expected a "
            "tensor of shape (batch, positions, classes), or an output with .logits"
        )
    return found


def _tokens_in(inputs: Any) -> Tensor | None:
    """The input tokens among a network's arguments: by their usual name, or whole numbers."""
    if isinstance(inputs, Mapping):
        inputs = (inputs["input_ids"],) if "input_ids" in inputs else tuple(inputs.values())
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    whole = [x for x in several if isinstance(x, Tensor) and not x.is_floating_point()]
    return whole[0] if whole else None
