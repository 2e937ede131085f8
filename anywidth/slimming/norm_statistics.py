"""Running statistics of a norm by width: it uses those of its current width.

The statistics of full width are its buffers; all others are in its bank, by configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _NormBase

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD, take
from anywidth.planning.held_buffers import buffers_restored
from anywidth.slimming.fingerprints import OUTDATED, Fingerprint, Weights
from anywidth.slimming.record import Record, record_of
from anywidth.width import ChannelConfig

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a norm that are separate for each width."""


# Passes at full width after which the statistics of a width that was not trained again are too old.
_MOST_PASSES = 100


class MissingStatisticsError(AnywidthError):
    """Raised when a width without batch-norm statistics is evaluated."""


@dataclass
class Affine:
    """A private scale and bias of one norm at one configuration."""

    weight: Tensor
    bias: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass
class Statistics:
    """Running statistics of one batch norm at one configuration.

    `label` is the width as the user gave it, for messages; `ready` is false until the first
    batch was seen. Training updates those that are tracked. `made_with` is None while they follow
    the weights: from a training pass until the next evaluation. `affine` was tuned after training
    (`anywidth.tune_norms`) and, like the statistics, belongs to these weights.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    label: float | None = None
    ready: bool = False
    is_tracked: bool = False
    made_with: Fingerprint | None = None
    trained_at: int = 0  # how often the full width was trained until then
    affine: Affine | None = None

    def tensors(self) -> list[Tensor]:
        return [self.running_mean, self.running_var, self.num_batches_tracked]

    def copy_from(self, other: Statistics) -> None:
        """Copy other statistics into these tensors, because a CUDA graph writes to them."""
        for held, value in zip(self.tensors(), other.tensors(), strict=True):
            held.copy_(value)
        self.ready, self.made_with = other.ready, other.made_with
        self.label = self.label if other.label is None else other.label
        self.affine = other.affine

    def follow(self, norm: nn.Module) -> None:
        """Follow the weights as training changes them, until the next evaluation."""
        self.made_with = None
        if not is_compiling():
            self.trained_at = _full_passes(norm)

    def settle(self, norm: nn.Module, now: Fingerprint) -> None:
        """Record the weights that statistics belong to, if they followed them until now."""
        if self.ready and self.made_with is None:
            is_old = _full_passes(norm) - self.trained_at > _MOST_PASSES
            self.made_with = OUTDATED if is_old else now


@dataclass(eq=False, repr=False)
class NormRecord(Record):
    """The record of a norm: its statistics by width, and its current width."""

    bank: dict[ChannelConfig, Statistics] = field(default_factory=dict)
    config: ChannelConfig | None = None
    is_full: bool = True
    label: float | None = None
    lacks_full: bool = False  # the buffers are not of these weights: an average has no others
    is_lenient: bool = False
    uses_batches: bool = False  # each batch is normalised by its own statistics
    is_calibrating: bool = False  # in training mode, but only for statistics
    # Configuration → index of its private scale and bias (`switchable.py`); None without any.
    switches: dict[ChannelConfig, int] | None = None
    has_tuned: bool = False  # whether a width has, or had, a scale and bias tuned for it
    # Of the network that the norm is part of.
    weights: Weights = field(default_factory=lambda: Weights(None))

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # a copy may get other weights
        return self.__dict__

    def settle(self) -> None:
        """Record the present weights in the statistics that training has updated."""
        root = self.weights.root
        if root is None or not any(e.ready and e.made_with is None for e in self.bank.values()):
            return
        now = self.weights.fingerprint()
        for norm, record in norm_records(root).items() if now is not None else ():
            for entry in record.bank.values():
                entry.settle(norm, now)  # type: ignore[arg-type]

    def switch(self, config: ChannelConfig, is_full: bool, label: float | None) -> None:
        """Use the statistics of another configuration."""
        self.config, self.is_full, self.label = config, is_full, label
        entry = self.bank.get(config)
        if entry is not None and entry.label is None:
            entry.label = label

    def is_ready(self, config: ChannelConfig) -> bool:
        """Whether there are statistics of a configuration, of the weights as they are now."""
        entry = self.bank.get(config)
        if entry is None or not entry.ready:
            return False
        self.settle()  # those that follow the weights may be too old to belong to them
        now = self.weights.fingerprint()
        return now is None or self.weights.belong_to(entry.made_with, now)

    def tuned(self, norm: nn.Module) -> Affine | None:
        """The scale and bias tuned for the current width; training uses the shared ones.

        If the weights have changed since, reading the statistics raises an error; here they are
        compared only if the statistics are not read.
        """
        entry = None if self.is_full else self.bank.get(self.config)  # type: ignore[arg-type]
        if entry is None or entry.affine is None or (norm.training and not self.is_calibrating):
            return None
        reads_none = self.is_lenient or self.uses_batches
        if reads_none and not self.is_ready(self.config):  # type: ignore[arg-type]
            return None
        return entry.affine

    def is_current(self, entry: Statistics, name: str) -> bool:
        """`is_ready` of the present configuration, computed once per pass."""
        weights = self.weights
        if weights.verdict and (weights.checker is not self or name != "running_var"):
            return True
        if not (weights.verdict and weights.is_fresh):
            weights.checker = self
            weights.verdict = self._is_of_these_weights(entry)
            weights.is_stale = not weights.verdict
        weights.is_fresh = name == "running_mean"  # the same pass asks for the variance next
        return weights.verdict is True

    def _is_of_these_weights(self, entry: Statistics) -> bool:
        root = self.weights.root
        if root is not None and root.training:  # with frozen norms, whose statistics it uses
            for norm, record in norm_records(root).items():
                if record.config in record.bank:
                    record.bank[record.config].follow(norm)
            return True
        self.settle()
        now = self.weights.fingerprint()
        if now is None or self.weights.belong_to(entry.made_with, now):
            entry.made_with = now or entry.made_with  # the same weights, but faster to compare
            return True
        return False

    def is_new(self, norm: nn.Module) -> bool:
        """Whether the network was never trained: every width then has the initial statistics.

        This is as at full width and as in PyTorch, because a trainer may validate before it trains.
        It does not hold in training mode, where the weights are about to change.
        """
        root = self.weights.root
        if is_compiling() or root is None or root.training or not is_initial(norm):
            return False
        return not any(e.ready for e in self.bank.values()) and self.weights.are_initial()

    def file(self, config: ChannelConfig, entry: Statistics) -> None:
        """Replace the statistics of a configuration."""
        entry.is_tracked = False
        self.bank.setdefault(config, entry).copy_from(entry)

    def sliced(self, norm: nn.Module, name: str) -> Tensor | None:
        """The statistics of full width, cut to the channels of the current width."""
        tensor, cut = norm._buffers[name], self.cut("running_mean", 0)
        if tensor is None or tensor.dim() == 0 or cut is None:
            return tensor
        return take(tensor, 0, cut)

    def assign(self, norm: nn.Module, name: str, value: Any) -> bool:
        """Store a value that is a statistic of a narrower width; returns whether it was one.

        Widths that are not tracked keep no statistics.
        """
        if name not in RUNNING or self.is_full:
            return False
        expected = self.sliced(norm, name)
        if expected is None or not isinstance(value, Tensor) or value.shape != expected.shape:
            return False
        entry = self.bank.get(self.config)  # type: ignore[arg-type]
        if entry is not None and (entry.is_tracked or not norm.training):
            with torch.no_grad():
                getattr(entry, name).copy_(value)
        return True

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """`model.to(...)`: the statistics of all widths move with the module."""
        self.weights.forget()
        for entry in self.bank.values():
            for name in RUNNING:
                setattr(entry, name, function(getattr(entry, name)))
            for name, tensor in entry.affine.tensors().items() if entry.affine is not None else ():
                setattr(entry.affine, name, function(tensor))

    def missing(self) -> MissingStatisticsError:
        """The error for evaluating the current width."""
        if self.is_full:
            return MissingStatisticsError(
                "batch norm has no statistics for these weights at full width. Call "
                "anywidth.calibrate(network, loader, widths=[1.0]) first"
            )
        ready = [entry.label for config, entry in self.bank.items() if self.is_ready(config)]
        known = sorted(label for label in ready if label is not None)
        width = "this configuration" if self.label is None else f"width {self.label}"
        entry = self.bank.get(self.config)  # type: ignore[arg-type]
        was_known = entry is not None and bool(entry.num_batches_tracked > 0)
        return MissingStatisticsError(
            f"batch norm has no statistics for {width}: it has them for the full width"
            + (f" and {known}" if known else " only")
            + ("; its statistics were made with other weights" if was_known else "")
            + f". Call anywidth.calibrate(model, loader, widths=[{self.label or 'config'}]) first"
        )


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module tracks running statistics, as batch norm does."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def norm_record(module: nn.Module) -> NormRecord | None:
    """The record of a norm that keeps statistics by width; None for any other module."""
    record = record_of(module)
    return record if isinstance(record, NormRecord) else None


def norm_records(model: nn.Module) -> dict[nn.Module, NormRecord]:
    """The norms of a network that keep statistics by width, with their records."""
    found = ((module, norm_record(module)) for module in model.modules())
    return {module: record for module, record in found if record is not None}


def scaled_norms(model: nn.Module) -> dict[nn.Module, NormRecord]:
    """Those of them that have a scale."""
    found = norm_records(model).items()
    return {norm: rec for norm, rec in found if norm._parameters.get("weight") is not None}


def is_initial(norm: nn.Module) -> bool:
    """Whether the full width's statistics are those that a new norm starts with.

    Files of old networks do not count batches, but have means.
    """
    mean, batches = norm._buffers["running_mean"], norm._buffers["num_batches_tracked"]
    if mean is None or mean.is_meta or (batches is not None and batches > 0):
        return False
    return not mean.any()


def _full_passes(norm: nn.Module) -> int:
    """How often a norm was trained at full width, without waiting for a GPU."""
    count = norm._buffers["num_batches_tracked"]
    return 0 if count is None or count.is_inference() else count._version


def new_statistics(norm: nn.Module, label: float | None, is_tracked: bool = False) -> Statistics:
    """The initial statistics of a norm of the current width."""
    like, size = norm._buffers["running_mean"], int(norm.num_features)  # type: ignore[arg-type]
    assert like is not None
    with torch.inference_mode(False):  # tensors made in that mode cannot be updated outside it
        return Statistics(
            like.new_zeros(size),
            like.new_ones(size),
            torch.zeros((), dtype=torch.long, device=like.device),
            label,
            is_tracked=is_tracked,
        )


def tracked_statistics(model: nn.Module) -> list[Statistics]:
    """The statistics of all widths except the full one, which has them in its buffers."""
    return [entry for record in norm_records(model).values() for entry in record.bank.values()]


def running_statistics(model: nn.Module, configs: Collection[ChannelConfig]) -> list[Tensor]:
    """The means and variances that training at some configurations has changed."""
    found: list[Tensor | None] = []
    for norm, record in norm_records(model).items():
        entries = [record.bank[config] for config in configs if config in record.bank]
        found += [tensor for entry in entries for tensor in (entry.running_mean, entry.running_var)]
        found += [norm._buffers["running_mean"], norm._buffers["running_var"]]
    return [tensor for tensor in found if tensor is not None]


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers and the statistics of all widths after a `with` block."""
    entries = tracked_statistics(model)
    before_that = [(entry.ready, entry.made_with, entry.affine) for entry in entries]
    tensors = [tensor for entry in entries for tensor in entry.tensors()]
    try:
        with buffers_restored(model, tensors):
            yield
    finally:
        for entry, values in zip(entries, before_that, strict=True):
            entry.ready, entry.made_with, entry.affine = values


def batch_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Normalise every batch by its own statistics, at every width, and keep none of them.

    For comparing many configurations without calibrating each.
    """
    return set_on_norms(model, "uses_batches")


def uncalibrated_allowed(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluate widths without statistics with those of full width, cut to their channels.

    For checks, and to show the effect of calibration; the accuracy is poor.
    """
    return set_on_norms(model, "is_lenient")


@contextlib.contextmanager
def set_on_norms(model: nn.Module, flag: str) -> Iterator[None]:
    """A flag of every norm's record is true inside a `with` block."""
    before = [(record, getattr(record, flag)) for record in norm_records(model).values()]
    for record, _ in before:
        setattr(record, flag, True)
    try:
        yield
    finally:
        for record, value in before:
            setattr(record, flag, value)


def reading_statistics(name: str) -> Callable[[nn.Module], Tensor | None]:
    """The property that replaces a buffer of a norm: the statistic of the current width."""

    def running(self: nn.Module) -> Tensor | None:
        record: NormRecord = self.__dict__[RECORD]
        if record.uses_batches:
            return None
        if record.is_full:
            if record.lacks_full and not (self.training or record.is_lenient):
                raise record.missing()
            return self._buffers[name]
        entry = record.bank.get(record.config)  # type: ignore[arg-type]
        if self.training:
            # Widths that are not tracked use the batch's own statistics.
            if entry is None or not entry.is_tracked:
                return None
            entry.ready = True
            entry.follow(self)
            if not record.is_calibrating:
                entry.affine = None  # it belongs to the earlier weights
        elif (
            entry is None
            or not entry.ready
            # A compiled pass only knows the result of `set_width`.
            or (record.weights.is_stale if is_compiling() else not record.is_current(entry, name))
        ):
            if not (record.is_lenient or record.is_new(self)):
                raise record.missing()
            return record.sliced(self, name)
        tensor: Tensor = getattr(entry, name)
        return tensor

    return running


def loading_statistics(plain: type[nn.Module]) -> Callable[..., None]:
    """`_load_from_state_dict` of a norm: statistics do not follow weights that are loaded.

    Loading the same weights again changes nothing.
    """

    def load(self: nn.Module, *arguments: Any) -> None:
        record: NormRecord = self.__dict__[RECORD]
        held = {name: self._buffers[name] for name in ("running_mean", "running_var")}
        before = {name: tensor.clone() for name, tensor in held.items() if tensor is not None}
        is_full, record.is_full = record.is_full, True  # a state_dict has the full width
        try:
            plain._load_from_state_dict(self, *arguments)
        finally:
            record.is_full = is_full
        record.lacks_full = False
        if not all(_is_same(self._buffers[name], value) for name, value in before.items()):
            for entry in record.bank.values():
                entry.ready = entry.ready and entry.made_with is not None
        record.weights.forget()

    return load


def training_statistics(plain: type[nn.Module]) -> Callable[..., Any]:
    """`train` of a norm: a change of mode makes evaluation compare the weights again."""

    def train(self: nn.Module, mode: bool = True) -> Any:
        record: NormRecord = self.__dict__[RECORD]
        record.weights.verdict = None
        record.weights.trainings.count += 1
        if self.training and not mode:
            record.settle()
        return plain.train(self, mode)

    return train


def _is_same(tensor: Tensor | None, value: Tensor) -> bool:
    if tensor is None or tensor.is_meta or tensor.device != value.device:
        return False
    return tensor.dtype == value.dtype and torch.equal(tensor, value)
