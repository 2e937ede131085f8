"""Batch-norm statistics of all widths as plain tensors, for a checkpoint of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.training.calibration import load_statistics, statistics_to_tensors

# The text that says which widths there are, as the numbers of its bytes.
_TEXT = "widths"


def statistics_state(model: nn.Module) -> dict[str, Tensor]:
    """The statistics that `model.state_dict()` does not hold: those of widths other than the full.

    Tensors alone, which `torch.save` and `torch.load(..., weights_only=True)` take. Like those of a
    `state_dict` they are the network's own, not copies.

    Example:
        >>> checkpoint = {
        ...     "model": model.state_dict(), "statistics": anywidth.statistics_state(model)
        ... }
        >>> model.load_state_dict(checkpoint["model"])  # first, as other weights end statistics
        >>> anywidth.load_statistics_state(model, checkpoint["statistics"])
    """
    tensors, text = statistics_to_tensors(model)
    return {_TEXT: torch.tensor(list(text[_TEXT].encode()), dtype=torch.uint8), **tensors}


def load_statistics_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts back what `statistics_state` returned, in place of what the network knows now.

    Args:
        model: a network of the same layers, converted with the same plan; its weights are to be
            loaded before.
        state: the tensors.
    """
    text = state.get(_TEXT) if isinstance(state, Mapping) else None
    if not isinstance(text, Tensor) or text.dtype != torch.uint8:
        raise AnywidthError(
            f"load_statistics_state(): expected what anywidth.statistics_state(model) returned, a "
            f"dict with a tensor {_TEXT!r}"
        )
    tensors = {name: tensor for name, tensor in state.items() if name != _TEXT}
    load_statistics(model, tensors, {_TEXT: bytes(text.tolist()).decode(errors="replace")})
