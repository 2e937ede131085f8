"""Running statistics of a norm by width: it reads those of the width it is set to.

The full width's are its buffers; all others are in its bank, by configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD, take
from anywidth.slimming.record import Record, record_of
from anywidth.width import ChannelConfig

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a norm that each width has its own of."""


class MissingStatisticsError(AnywidthError):
    """A width is evaluated whose batch-norm statistics are not known."""


@dataclass
class Statistics:
    """Running statistics of one batch norm at one configuration.

    `label` is the width as the user gave it, for messages; `ready` is false until the first
    batch was seen.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    label: float | None = None
    ready: bool = False

    def tensors(self) -> list[Tensor]:
        return [self.running_mean, self.running_var, self.num_batches_tracked]

    def copy_from(self, other: Statistics) -> None:
        """Takes over another's, into the tensors that are here: a CUDA graph writes to those."""
        for held, value in zip(self.tensors(), other.tensors(), strict=True):
            held.copy_(value)
        self.label, self.ready = other.label, other.ready


class NormRecord(Record):
    """The record of a norm: its statistics by width, and the width that it runs at."""

    def __init__(self, plain: type[nn.Module], tensors: tuple[str, ...] = ()) -> None:
        super().__init__(plain, tensors)
        self.bank: dict[ChannelConfig, Statistics] = {}
        self.config: ChannelConfig | None = None
        self.is_full = True
        self.label: float | None = None
        self.is_lenient = False
        self.uses_batches = False  # each batch is normalised by its own statistics
        # Which private scale and bias a configuration has (`switchable.py`); None without any.
        self.switches: dict[ChannelConfig, int] | None = None

    def switch(self, config: ChannelConfig, is_full: bool, label: float | None) -> None:
        """Reads the statistics of another configuration from now on."""
        self.config, self.is_full, self.label = config, is_full, label
        entry = self.bank.get(config)
        if entry is not None and entry.label is None:
            entry.label = label

    def is_ready(self, config: ChannelConfig) -> bool:
        entry = self.bank.get(config)
        return entry is not None and entry.ready

    def file(self, config: ChannelConfig, entry: Statistics) -> None:
        """Keeps statistics of a configuration in place of those it has."""
        self.bank.setdefault(config, entry).copy_from(entry)

    def sliced(self, norm: nn.Module, name: str) -> Tensor | None:
        """The first of the full width's, as many as the present width has."""
        tensor, cut = norm._buffers[name], self.cut("running_mean", 0)
        if tensor is None or tensor.dim() == 0 or cut is None:
            return tensor
        return take(tensor, 0, cut)

    def assign(self, norm: nn.Module, name: str, value: Any) -> bool:
        """Whether a value is one of a narrower width's statistics; it has then been put there.

        A width that is not tracked keeps none.
        """
        if name not in RUNNING or self.is_full:
            return False
        expected = self.sliced(norm, name)
        if expected is None or not isinstance(value, Tensor) or value.shape != expected.shape:
            return False
        entry = self.bank.get(self.config)  # type: ignore[arg-type]
        if entry is not None:
            with torch.no_grad():
                getattr(entry, name).copy_(value)
        return True

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """`model.to(...)`: the statistics of all widths move with the module."""
        for entry in self.bank.values():
            for name in RUNNING:
                setattr(entry, name, function(getattr(entry, name)))

    def missing(self) -> MissingStatisticsError:
        """What evaluating the present width is answered with."""
        entries = self.bank.values()
        known = sorted(e.label for e in entries if e.ready and e.label is not None)
        width = "this configuration" if self.label is None else f"width {self.label}"
        entry = self.bank.get(self.config)  # type: ignore[arg-type]
        was_known = entry is not None and bool(entry.num_batches_tracked > 0)
        return MissingStatisticsError(
            f"batch norm has no statistics for {width}: calibrated are the full width"
            + (f" and {known}" if known else " alone")
            + ("; what it had was of the weights before load_state_dict" if was_known else "")
            + f". Call anywidth.calibrate(model, loader, widths=[{self.label or 'config'}]) first"
        )


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module tracks what it normalises by, as batch norm does."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def norm_record(module: nn.Module) -> NormRecord | None:
    """The record of a norm that keeps statistics by width; None for any other module."""
    record = record_of(module)
    return record if isinstance(record, NormRecord) else None


def norm_records(model: nn.Module) -> dict[nn.Module, NormRecord]:
    """The norms of a network that keep statistics by width, with their records."""
    found = ((module, norm_record(module)) for module in model.modules())
    return {module: record for module, record in found if record is not None}


def new_statistics(norm: nn.Module, label: float | None) -> Statistics:
    """Statistics as a new norm of the present width would start with."""
    like, size = norm._buffers["running_mean"], int(norm.num_features)  # type: ignore[arg-type]
    assert like is not None
    with torch.inference_mode(False):  # what is made in that mode could never be updated outside
        return Statistics(
            like.new_zeros(size),
            like.new_ones(size),
            torch.zeros((), dtype=torch.long, device=like.device),
            label,
        )


def tracked_statistics(model: nn.Module, config: ChannelConfig | None = None) -> list[Statistics]:
    """What a network knows of widths other than the full one, whose are in its buffers.

    Of one configuration, or of all.
    """
    banks = [record.bank for record in norm_records(model).values()]
    return [e for bank in banks for c, e in bank.items() if config is None or c == config]


def running_statistics(model: nn.Module, configs: Collection[ChannelConfig]) -> list[Tensor]:
    """Means and variances that training at some configurations has moved."""
    found: list[Tensor | None] = []
    for norm, record in norm_records(model).items():
        entries = [record.bank[config] for config in configs if config in record.bank]
        found += [tensor for entry in entries for tensor in (entry.running_mean, entry.running_var)]
        found += [norm._buffers["running_mean"], norm._buffers["running_var"]]
    return [tensor for tensor in found if tensor is not None]


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what passes in between have changed: buffers, and statistics of all widths."""
    entries = tracked_statistics(model)
    ready = [entry.ready for entry in entries]
    held = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.buffers(), *(tensor for entry in entries for tensor in entry.tensors())]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)  # a forward may have assigned others
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for entry, was_ready in zip(entries, ready, strict=True):
            entry.ready = was_ready


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Normalises every batch by its own statistics, at every width, and keeps none of them.

    For comparing many configurations without calibrating each.
    """
    records = norm_records(model).values()
    for record in records:
        record.uses_batches = True
    try:
        yield
    finally:
        for record in records:
            record.uses_batches = False


@contextlib.contextmanager
def uncalibrated_allowed(model: nn.Module) -> Iterator[None]:
    """Lets widths without statistics be evaluated with the first of the full width's.

    For checks and for showing what calibration is worth; accuracy is poor there.
    """
    records = norm_records(model).values()
    before = [record.is_lenient for record in records]
    for record in records:
        record.is_lenient = True
    try:
        yield
    finally:
        for record, was_lenient in zip(records, before, strict=True):
            record.is_lenient = was_lenient


def reading_statistics(name: str) -> Callable[[nn.Module], Tensor | None]:
    """What a norm's class is given in place of one of its buffers: that of the present width."""

    def running(self: nn.Module) -> Tensor | None:
        record: NormRecord = self.__dict__[RECORD]
        if record.uses_batches:
            return None
        if record.is_full:
            return self._buffers[name]
        entry = record.bank.get(record.config)  # type: ignore[arg-type]
        if self.training:
            # Widths that are not tracked use the batch's own statistics and leave no trace.
            if entry is None:
                return None
            entry.ready = True
        elif entry is None or not entry.ready:
            if not record.is_lenient:
                raise record.missing()
            return record.sliced(self, name)
        tensor: Tensor = getattr(entry, name)
        return tensor

    return running


def loading_statistics(plain: type[nn.Module]) -> Callable[..., None]:
    """Loads a norm; where it gets other statistics, those of narrower widths hold no longer.

    They are of the weights before, and would be wrong in silence. The same weights loaded again
    change nothing.
    """

    def load(self: nn.Module, *arguments: Any) -> None:
        record: NormRecord = self.__dict__[RECORD]
        names = ("running_mean", "running_var")
        held = [self._buffers[name] for name in names]
        values = [None if tensor is None else tensor.clone() for tensor in held]
        is_full, record.is_full = record.is_full, True  # a state_dict is of the full width
        try:
            plain._load_from_state_dict(self, *arguments)
        finally:
            record.is_full = is_full
        if not all(_is_same(self._buffers[n], v) for n, v in zip(names, values, strict=True)):
            for entry in record.bank.values():
                entry.ready = False

    return load


def _is_same(tensor: Tensor | None, value: Tensor | None) -> bool:
    if tensor is None or value is None:
        return tensor is value
    is_comparable = tensor.device == value.device and not tensor.is_meta
    return is_comparable and tensor.dtype == value.dtype and torch.equal(tensor, value)
