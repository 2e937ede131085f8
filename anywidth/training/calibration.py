"""Batch-norm statistics after training, for any width: the paper's post-statistics."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from anywidth.distributed import Group, average, members
from anywidth.errors import AnywidthError
from anywidth.modes import evaluating
from anywidth.slimming.convert import at_width, set_width
from anywidth.slimming.norm_statistics import (
    RUNNING,
    NormRecord,
    Statistics,
    new_statistics,
    norm_record,
    norm_records,
    tracked_statistics,
)
from anywidth.slimming.state import check_layers, state_of
from anywidth.training.calibration_batches import calibration_batches, samples_in
from anywidth.width import ChannelConfig, Width, is_number, whole_number, width_list

Method = Literal["exact", "moving"]
Norms = Mapping[nn.Module, NormRecord]


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    widths: Sequence[Width],
    *,
    method: Method = "exact",
    samples: int | None = None,
    momentum: float = 0.1,
    progress: Callable[[int], None] | None = None,
    process_group: Group = None,
) -> None:
    """Computes batch-norm statistics of some widths over training samples, and keeps them.

    Each batch is read once and passed through the network at every width, with batch norm alone
    in training mode and no gradients.

    Args:
        model: a converted network.
        loader: batches, or (batch, labels, ...) tuples, of training data: as evaluation sees it,
            or, where training has learned its images by heart, augmented as in training. For a
            network of several arguments, or of one that is a dict, a batch in such a tuple is a
            tuple of them.
        widths: fractions or `ChannelConfig`s.
        method: `"exact"` averages over all batches, each weighted by its samples: equation 8 of
            the paper, m = (t - 1) / t for batches of one size. `"moving"` is equation 5.
        samples: stop after so many; about a thousand random ones do nearly as well as all.
        momentum: weight of a new batch in a moving average.
        progress: called after each pass with the number of passes there were.
        process_group: processes that share the widths out, and afterwards know all of them: each
            must be given the same batches. `"world"` is all of them; None computes every width in
            this process, so that one rank may calibrate alone.

    Widths calibrated before keep their statistics; the same width is computed anew. If anything
    fails, or a statistic comes out as NaN or infinite, the statistics are as they were.
    `anywidth.save` keeps them in a file; `state_dict` holds those of the full width alone, and
    `load_state_dict` with other weights ends those of narrower widths. After more training,
    calibrate anew: statistics are those of the weights they were computed with.
    """
    state = state_of(model)
    check_layers(model)
    if method not in ("exact", "moving"):
        raise AnywidthError(f"method {method!r}: expected 'exact' or 'moving'")
    if samples is not None and (whole_number(samples) or 0) < 2:
        raise AnywidthError(f"samples={samples!r}: batch statistics need at least 2")
    if not is_number(momentum) or not 0 < momentum <= 1:
        raise AnywidthError(f"momentum={momentum!r}: expected a number above 0, at most 1")
    labels: dict[ChannelConfig, float | None] = {}
    for width in width_list(widths, "calibrate"):
        named = state.plan.widths.fraction(width) if isinstance(width, float) else None
        labels[state.resolve(width)] = named
    norms = norm_records(model)
    group = members(process_group)
    mine = list(labels) if group is None else list(labels)[group.rank() :: group.size()]
    fresh = {
        key: entry
        for config in mine
        for key, entry in _empty(model, norms, config, labels[config]).items()
    }
    if norms:
        with (
            _only_norms_training(model, norms),
            _writing_to(norms, fresh, state.plan.full),
            _counting_batches(norms),
            _RepeatedNorms(None if method == "exact" else momentum) as repeated,
            torch.no_grad(),
        ):
            seen, passes = 0, 0
            for inputs in calibration_batches(loader, model, samples):
                count = samples_in(inputs)
                seen += count
                share = count / seen
                if method == "moving":
                    share = momentum if seen > count else 1.0
                for norm in norms:
                    norm.__dict__["momentum"] = share
                for config in mine:
                    set_width(model, config)
                    model(*inputs)
                    if seen == count and config == mine[0] and repeated.found(norms):
                        model(*inputs)  # anew, each use with a share of its own
                    passes += 1
                    if progress is not None:
                        progress(passes)
        if seen == 0:
            raise AnywidthError("calibrate() got no data: the loader is empty")
    if group is not None:
        _share(model, norms, labels, mine, fresh, group)
    _check_finite(model, labels, fresh)
    for config, (norm, record) in itertools.product(labels, norms.items()):
        entry = fresh[norm, config]
        if not entry.num_batches_tracked:  # a head that only training has, say
            if config == state.plan.full or record.is_ready(config):
                continue
            _slice_statistics(model, norm, record, config, entry)
        entry.ready = True
        if config == state.plan.full:
            _put_into_buffers(norm, entry)
        else:
            record.file(config, entry)


def calibrated_widths(model: nn.Module) -> list[Width]:
    """The widths that can be evaluated: fractions where one was named, configurations otherwise.

    A network without batch norm can be evaluated at every width; for it the list is empty.
    """
    plan = state_of(model).plan
    full: Width = 1.0 if plan.widths.high == 1.0 else plan.full
    for record in norm_records(model).values():
        ready = [(c, e) for c, e in record.bank.items() if e.ready]
        named = sorted(e.label for _, e in ready if e.label is not None)
        return [*named, *(c for c, e in ready if e.label is None), full]
    return []


def is_full_width_new(model: nn.Module) -> bool:
    """Whether the full width's statistics are those that a new network starts with.

    So they stay where training leaves the full width out. Files of old networks do not count
    batches, but have means.
    """
    for norm in norm_records(model):
        mean, batches = norm._buffers["running_mean"], norm._buffers["num_batches_tracked"]
        counted = batches is not None and bool(batches > 0)
        return not counted and mean is not None and not bool(mean.any())
    return False


def _slice_statistics(
    model: nn.Module, norm: nn.Module, record: NormRecord, config: ChannelConfig, entry: Statistics
) -> None:
    """Gives a norm that no pass ran the first of the full width's statistics."""
    with at_width(model, config):
        for name in ("running_mean", "running_var"):
            values = record.sliced(norm, name)
            if values is not None:
                getattr(entry, name).copy_(values)


def _put_into_buffers(norm: nn.Module, entry: Statistics) -> None:
    """The full width's statistics are the buffers that `state_dict` holds."""
    for name in RUNNING:
        buffer = norm._buffers[name]
        if buffer is not None:
            buffer.copy_(getattr(entry, name))


def _empty(
    model: nn.Module, norms: Norms, config: ChannelConfig, label: float | None
) -> dict[tuple[nn.Module, ChannelConfig], Statistics]:
    with at_width(model, config):
        return {(norm, config): new_statistics(norm, label) for norm in norms}


@contextlib.contextmanager
def _only_norms_training(model: nn.Module, norms: Norms) -> Iterator[None]:
    momenta = [norm.momentum for norm in norms]
    width = state_of(model).width
    with evaluating(model):
        for norm in norms:
            norm.train()
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            set_width(model, width)


@contextlib.contextmanager
def _writing_to(
    norms: Norms,
    fresh: Mapping[tuple[nn.Module, ChannelConfig], Statistics],
    full_config: ChannelConfig,
) -> Iterator[None]:
    """Points every norm at the new statistics while they are computed."""
    before = [(record.bank, dict(norm._buffers)) for norm, record in norms.items()]
    for norm, record in norms.items():
        record.bank = {config: entry for (owner, config), entry in fresh.items() if owner is norm}
        full = record.bank.get(full_config)
        if full is not None:
            norm._buffers.update({name: getattr(full, name) for name in RUNNING})
    try:
        yield
    finally:
        for (norm, record), (bank, buffers) in zip(norms.items(), before, strict=True):
            record.bank = bank
            norm._buffers.update(buffers)


@contextlib.contextmanager
def _counting_batches(norms: Norms) -> Iterator[None]:
    """Has instance norms count what they see, as batch norms do by themselves."""

    def count(norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        norm.num_batches_tracked.add_(1)  # type: ignore[operator]

    hooks = [
        norm.register_forward_pre_hook(count) for norm in norms if isinstance(norm, _InstanceNorm)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _RepeatedNorms:
    """Norms that one pass uses several times: each use has its own share in their averages.

    The others have the same share in a whole batch and are left without hooks, with which a GPU
    would not use its kernels.
    """

    def __init__(self, momentum: float | None) -> None:
        self._momentum = momentum
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[tuple[nn.Module, ChannelConfig | None], int] = {}

    def __enter__(self) -> _RepeatedNorms:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def found(self, norms: Norms) -> bool:
        """Whether there are any; to be asked after the first pass."""
        repeated = [norm for norm in norms if int(norm.num_batches_tracked) > 1]  # type: ignore[arg-type]
        self._hooks = [norm.register_forward_pre_hook(self._weigh) for norm in repeated]
        return bool(repeated)

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


def _share(
    model: nn.Module,
    norms: Norms,
    labels: Mapping[ChannelConfig, float | None],
    mine: Sequence[ChannelConfig],
    fresh: dict[tuple[nn.Module, ChannelConfig], Statistics],
    group: dist.ProcessGroup,
) -> None:
    """Sends each width's statistics from the rank that computed them to all others."""
    for number, config in enumerate(labels):
        if config not in mine:
            fresh |= _empty(model, norms, config, labels[config])
        for norm in norms:
            for tensor in fresh[norm, config].tensors():
                dist.broadcast(tensor, group=group, group_src=number % group.size())


def _check_finite(
    model: nn.Module,
    labels: Mapping[ChannelConfig, float | None],
    fresh: Mapping[tuple[nn.Module, ChannelConfig], Statistics],
) -> None:
    paths = {module: path for path, module in model.named_modules()}
    for (norm, config), entry in fresh.items():
        if not (entry.running_mean.isfinite() & entry.running_var.isfinite()).all():
            width = config if labels[config] is None else f"width {labels[config]}"
            raise AnywidthError(
                f"calibrate(): the statistics of {paths[norm]!r} at {width} came out as NaN or "
                "infinite, so none were kept: look for such values in the batches, and in the "
                "network's parameters"
            )


# ---- on disk -------------------------------------------------------------------------------------


def statistics_to_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The statistics of all widths but the full one, as named tensors and a text to file them by.

    The full width's are in `model.state_dict()`.
    """
    state_of(model)
    tensors: dict[str, Tensor] = {}
    order: dict[ChannelConfig, int] = {}
    widths: list[dict[str, Any]] = []
    for path, module in model.named_modules():
        record = norm_record(module)
        for config, entry in {} if record is None else record.bank.items():
            if config not in order:
                order[config] = len(order)
                label, ready = entry.label, entry.ready
                widths.append({"width": label, "ready": ready, "channels": config.to_json()})
            for name in RUNNING:
                tensors[f"{order[config]}/{path}.{name}"] = getattr(entry, name)
    return tensors, {"widths": json.dumps(widths)}


# (a norm's record, configuration, what it is to know of that)
Loaded = list[tuple[NormRecord, ChannelConfig, Statistics]]


def load_statistics(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Puts back what `statistics_to_tensors` returned, in place of what is known now.

    Weights are to be loaded before: other ones would end what is put back here.
    """
    put_statistics(model, read_statistics(model, tensors, metadata))


def read_statistics(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Loaded:
    """What `put_statistics` takes, once all of it is known to fit."""
    state = state_of(model)
    try:
        widths = json.loads(metadata["widths"])
        configs = [ChannelConfig.from_json(entry["channels"]) for entry in widths]
        labels = [(entry["width"], entry["ready"]) for entry in widths]
    except (KeyError, TypeError, ValueError) as error:
        raise AnywidthError(f"these are not batch-norm statistics of anywidth: {error}") from error
    norms = norm_records(model)
    paths = {module: path for path, module in model.named_modules()}
    loaded: Loaded = []
    for number, config in enumerate(configs):
        state.plan.check(config)
        expected = _empty(model, norms, config, None)
        for norm, record in norms.items():
            path, statistics = paths[norm], expected[norm, config]
            statistics.label, statistics.ready = labels[number]
            for name in RUNNING:
                given, held = tensors.get(f"{number}/{path}.{name}"), getattr(statistics, name)
                if given is None:
                    raise AnywidthError(f"statistics of {path!r} are missing for {config}")
                if given.shape != held.shape:
                    raise AnywidthError(
                        f"statistics of {path!r} do not fit {config}: {name} has shape "
                        f"{tuple(given.shape)}, expected {tuple(held.shape)}"
                    )
                held.copy_(given)
            loaded.append((record, config, statistics))
    return loaded


def put_statistics(model: nn.Module, loaded: Loaded) -> None:
    configs = {config for _, config, _ in loaded}
    for record in norm_records(model).values():
        for config in set(record.bank) - configs:
            del record.bank[config]
    for record, config, statistics in loaded:
        record.file(config, statistics)


def average_statistics(model: nn.Module) -> None:
    """Averages tracked batch-norm statistics over ranks, so that all validate the same network."""
    tensors = [b for b in model.buffers() if b.is_floating_point()]
    for entry in tracked_statistics(model):
        tensors += [entry.running_mean, entry.running_var]
    average(tensors)
