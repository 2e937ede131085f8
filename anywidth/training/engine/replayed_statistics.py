"""The running statistics that a graph reads and writes, about which a replay tells nobody."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anywidth.slimming.converted_part import network_in
from anywidth.slimming.norm_statistics import RUNNING, Statistics, norm_records
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig


class ReplayedStatistics:
    """The statistics of one configuration, for the norms of a network as they are now.

    A norm in training writes those that are tracked. A frozen norm reads its own, and its tuned
    scale; a graph knows only the tensors it was captured with.
    """

    def __init__(self, model: nn.Module, config: ChannelConfig) -> None:
        self._config = config
        self._norms = list(norm_records(model).items())
        self._held = self._tensors()
        written: list[Tensor | None] = []
        is_full = config == state_of(network_in(model)).plan.full
        for norm, record in self._norms:
            if norm.training and is_full:
                written += [norm._buffers[name] for name in RUNNING]
            elif norm.training and config in record.bank:
                entry = record.bank[config]
                written += entry.tensors() if entry.is_tracked else []
        self._written = [tensor for tensor in written if tensor is not None]

    def are_elsewhere(self) -> bool:
        """Whether the network now uses other tensors."""
        now = self._tensors()
        return len(now) != len(self._held) or any(
            one is not other for one, other in zip(now, self._held, strict=True)
        )

    def note_replay(self) -> None:
        """Record what a pass in Python would have recorded."""
        torch.autograd.graph.increment_version(self._written)
        for norm, record in self._norms:
            entry = record.bank.get(self._config)
            if entry is not None and (entry.is_tracked or not norm.training):
                entry.follow(norm)
                if norm.training:
                    entry.ready, entry.affine = True, None

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for norm, record in self._norms:
            entry: Statistics | None = record.bank.get(self._config)
            if entry is None or (norm.training and not entry.is_tracked):
                continue
            found += entry.tensors()
            if entry.affine is not None and not norm.training:
                found += entry.affine.tensors().values()
        return found
