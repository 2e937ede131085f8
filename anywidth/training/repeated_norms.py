"""Norms that one pass of a calibration uses several times."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anywidth.slimming.norm_statistics import norm_record
from anywidth.width import ChannelConfig


class RepeatedNorms:
    """Norms that one pass uses several times: each use has its own share in their averages.

    All other norms get no hooks, because with hooks a GPU would not use its kernels.
    """

    def __init__(self, momentum: float | None) -> None:
        self._momentum = momentum
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[tuple[nn.Module, ChannelConfig | None], int] = {}

    def __enter__(self) -> RepeatedNorms:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def found(self, norms: Iterable[nn.Module]) -> bool:
        """Whether there are such norms; call it after the first pass."""
        repeated = [norm for norm in norms if int(norm.num_batches_tracked) > 1]  # type: ignore[arg-type]
        self.weigh(repeated)
        return bool(repeated)

    def weigh(self, norms: Iterable[nn.Module]) -> None:
        self._hooks = [norm.register_forward_pre_hook(self._weigh) for norm in norms]

    def _weigh(self, norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        record = norm_record(norm)
        assert record is not None
        key = norm, record.config
        values = arguments[0].numel() // arguments[0].shape[1]
        before = self._seen.get(key, 0)
        self._seen[key] = before + values
        share = values / self._seen[key]
        if self._momentum is not None:
            share = self._momentum if before else 1.0
        norm.__dict__["momentum"] = share
