"""A moving average (EMA) of the weights of a network in training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.distributed import check_not_sharded
from anywidth.errors import AnywidthError, misfits
from anywidth.slimming.convert import plan_of
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.extraction import without_graphs
from anywidth.slimming.layers import drop_fast_paths
from anywidth.slimming.norm_statistics import RUNNING, norm_records
from anywidth.training.calibration import calibrate
from anywidth.training.optimizer_hooks import stepping
from anywidth.width import Width, is_number

_UPDATES, _WEIGHTS = "updates", "weights/"


class WeightAverage:
    """A moving average of a network's weights, which is often better than the last weights.

    `SandwichStep(..., ema_decay=0.997)` makes one, as `step.ema`, and updates it whenever the
    optimizer takes a step. At the end, `step.ema.copy_to(model, loader)` puts it in place of the
    weights. Batch-norm statistics are not averaged: they are computed with the averaged weights.

    `network` is a copy of the network with the averaged weights, without statistics for them.
    Calibrate it before you evaluate it, at full width too; an update ends its statistics.

    Args:
        model: a converted network, or a model with one in it.
        decay: the share that an update keeps. Early updates keep less, (1 + n) / (10 + n) after n
            of them, so that the initial weights do not stay in the average.
    """

    def __init__(self, model: nn.Module, decay: float = 0.997) -> None:
        if not is_number(decay) or not 0 < decay < 1:
            raise AnywidthError(
                f"decay={decay!r}: expected a number between 0 and 1, such as 0.997"
            )
        network_in(model)
        check_not_sharded(model, "WeightAverage")
        self.decay = decay
        self._source = model
        with without_graphs(model):
            self.network = copy.deepcopy(model).requires_grad_(False).eval()
        drop_fast_paths(self.network)  # it runs at one width, for which PyTorch's layers do
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the network's present weights."""
        self.updates = 0
        device = next(self._source.parameters()).device
        if next(self.network.parameters()).device != device:
            self.network.to(device)
        self._copy_rest()
        for own, source in zip(self.network.parameters(), self._source.parameters(), strict=True):
            own.data = source.detach().clone()  # it may have another dtype by now
        # The copy's own parameters, if these are exact enough: in half precision most updates
        # would be rounded away, because each is a small share.
        self._averages = {
            name: parameter.to(torch.promote_types(parameter.dtype, torch.float32))
            for name, parameter in self.network.named_parameters()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the network's present weights."""
        self.updates += 1
        share = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = list(self._averages.values())
        pairs = zip(self._source.parameters(), averages, strict=True)
        now = [source.detach().to(average) for source, average in pairs]
        torch._foreach_lerp_(averages, now, share)
        _put(dict(self.network.named_parameters()), self._averages)
        self._copy_rest()

    def copy_to(
        self, model: nn.Module, loader: Iterable[Any] | None = None, **options: Any
    ) -> None:
        """Put the averages in place of a network's weights, and calibrate it.

        The full width and all widths that have statistics are calibrated. After an error the
        network is as before.

        Args:
            model: the network in training, or a copy of it.
            loader: as for `anywidth.calibrate`; a network without batch norm needs none.
            options: further arguments of `anywidth.calibrate`.
        """
        widths = _known_widths(model)
        if widths and loader is None:
            raise AnywidthError(
                "copy_to(): batch norm needs statistics for the averaged weights: pass a loader of "
                "training batches, as for anywidth.calibrate"
            )
        held = dict(model.named_parameters())
        _check_names(self._averages, held, "this network")
        before = {name: parameter.detach().clone() for name, parameter in held.items()}
        try:
            _put(held, self._averages)
            if loader is not None and widths:
                calibrate(model, loader, widths, **options)
        except BaseException:
            _put(held, before)
            raise

    def state_dict(self) -> dict[str, Tensor]:
        """The averages and the number of updates, as tensors."""
        weights = {_WEIGHTS + name: one.detach() for name, one in self._averages.items()}
        return {_UPDATES: torch.tensor(self.updates), **weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`; load the network's weights first."""
        updates = state.get(_UPDATES)
        if not isinstance(updates, Tensor) or updates.numel() != 1:
            raise AnywidthError("this is no state of a WeightAverage: it has no number of updates")
        given = {n.removeprefix(_WEIGHTS): t for n, t in state.items() if n != _UPDATES}
        _check_names(given, self._averages, "the network of this WeightAverage")
        self.restart()
        _put(self._averages, given)
        _put(dict(self.network.named_parameters()), self._averages)
        self.updates = int(updates)

    def _copy_rest(self) -> None:
        """Buffers follow the network, except statistics, which belong to its weights."""
        norms = norm_records(self.network)
        for record in norms.values():
            record.lacks_full = True
        modules = zip(self.network.modules(), self._source.modules(), strict=True)
        for own, source in modules:
            for name, buffer in own._buffers.items():
                value = source._buffers.get(name)
                if buffer is None or value is None or (own in norms and name in RUNNING):
                    continue
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    own._buffers[name] = value.clone()


def _known_widths(model: nn.Module) -> list[Width]:
    """The full width and those with statistics of their own; none without batch norm."""
    records = list(norm_records(model).values())
    if not records:
        return []
    bank = records[0].bank
    named = [config if entry.label is None else entry.label for config, entry in bank.items()]
    return [plan_of(model).full, *named]


@torch.no_grad()
def _put(held: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in held.items():
        if tensor is not values[name]:
            tensor.copy_(values[name])


def _check_names(given: Mapping[str, Tensor], held: Mapping[str, Tensor], whose: str) -> None:
    if wrong := misfits(given, held):
        raise AnywidthError(f"averages of other weights than those of {whose}; {wrong}")


def update_after(optimizers: Sequence[torch.optim.Optimizer], average: WeightAverage) -> None:
    """Update an average whenever the last of these optimizers has taken a step."""
    if not optimizers:
        raise AnywidthError(
            "ema_decay needs the optimizer, after whose steps the average is updated: pass it, or "
            "make an anywidth.WeightAverage and call its update() after each step"
        )
    stepping(optimizers[-1]).register_step_post_hook(lambda *_: average.update())
