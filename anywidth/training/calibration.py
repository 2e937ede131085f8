"""Batch-norm statistics after training, for any width: the paper's post-statistics."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from anywidth.distributed import Group, average, members
from anywidth.errors import AnywidthError
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width, plan_of, set_width
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.fingerprints import Weights
from anywidth.slimming.norm_statistics import (
    RUNNING,
    NormRecord,
    Statistics,
    is_initial,
    new_statistics,
    norm_record,
    norm_records,
    set_on_norms,
    tracked_statistics,
)
from anywidth.slimming.state import check_layers, state_of
from anywidth.training.calibration_batches import calibration_batches
from anywidth.training.step_checks import inputs_kept
from anywidth.width import ChannelConfig, Width, is_number, whole_number, width_list

Method = Literal["exact", "moving"]
Norms = Mapping[nn.Module, NormRecord]
Fresh = dict[ChannelConfig, dict[nn.Module, Statistics]]
"""New statistics, by configuration and norm."""


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
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Compute and store the batch-norm statistics of some widths over training samples.

    Each batch is read once and passed through the network at every width, without gradients and
    with only batch norm in training mode.

    Args:
        model: a converted network, or a model with one in it.
        loader: batches, or (batch, labels, ...) tuples, of training data, preprocessed as for
            evaluation; if the network has memorised its training images, augmented as in training.
            For a network with several arguments, a batch in such a tuple is a tuple of arguments,
            or a dict from name to argument; those that it needs may also come without a tuple of
            their own: (nodes, edges, labels).
        widths: fractions or `ChannelConfig`s.
        method: `"exact"` averages over all batches, each weighted by its samples: equation 8 of
            the paper, m = (t - 1) / t for batches of one size. `"moving"` is equation 5.
        samples: number of samples to use; about a thousand random ones are nearly as good as all.
        momentum: weight of a new batch in a moving average.
        progress: called after each pass with the number of passes so far.
        process_group: processes that divide the widths among themselves and then exchange the
            results; each must get the same batches. `"world"` is all processes; None computes every
            width in this process, so that one rank can calibrate alone.
        forward: runs one batch, for batches of other forms: a function of (model, batch), such as
            lambda model, batch: model(batch[0]). Batches are then weighted by the values that reach
            each norm.

    Other widths that were calibrated before keep their statistics. If anything fails, or a
    statistic is NaN or infinite, all statistics stay unchanged. A network without batch norm gets a
    warning, because its widths need no calibration. `anywidth.save` saves the statistics of all
    widths; `state_dict` has only those of the full width.
    Statistics belong to the weights they were computed with: after more training, and for an
    average of weights (EMA), calibrate again.
    """
    network = network_in(model)
    state = state_of(network)
    check_layers(network)
    _check_options(method, samples, momentum, forward)
    labels: dict[ChannelConfig, float | None] = {}
    for width in width_list(widths, "calibrate"):
        named = state.plan.widths.fraction(width) if isinstance(width, float) else None
        labels[state.resolve(width)] = named
    norms = norm_records(model)
    if not norms:
        warnings.warn(
            f"{type(model).__name__} has no batch norm, so there is nothing to calibrate: every "
            "width can be evaluated as it is",
            stacklevel=2,
        )
        return
    group = members(process_group)
    mine = list(labels) if group is None else list(labels)[group.rank() :: group.size()]
    fresh = {config: empty_statistics(model, config, labels[config]) for config in mine}
    with (
        collecting(model, fresh),
        _NormHooks(norms, None if method == "exact" else momentum) as hooks,
        torch.no_grad(),
    ):
        seen, passes = 0, 0
        if forward is not None:  # the number of samples in such a batch is unknown
            hooks.weigh(norms)
        run = (lambda model, inputs: model(*inputs)) if forward is None else forward
        for count, inputs in calibration_batches(loader, model, samples, forward is not None):
            seen += count
            share = count / seen
            if method == "moving":
                share = momentum if seen > count else 1.0
            for norm in norms:
                norm.__dict__["momentum"] = share
            for config in mine:
                set_width(model, config)
                with _finding_last_norm(model, state.weights, passes == 0), inputs_kept(inputs):
                    run(model, inputs)
                is_first = seen == count and config == mine[0] and forward is None
                if is_first and hooks.found_repeated(norms):
                    run(model, inputs)  # again, with a separate share for each use
                passes += 1
                if progress is not None:
                    progress(passes)
    if seen == 0:
        raise AnywidthError("calibrate() got no data: the loader is empty")
    if group is not None:
        _share(model, labels, fresh, group)
    _check_finite(model, labels, fresh)
    _store(model, labels, fresh)


def _check_options(method: str, samples: Any, momentum: Any, forward: Any) -> None:
    if method not in ("exact", "moving"):
        raise AnywidthError(f"method {method!r}: expected 'exact' or 'moving'")
    if samples is not None and (whole_number(samples) or 0) < 2:
        raise AnywidthError(f"samples={samples!r}: batch statistics need at least 2")
    if samples is not None and forward is not None:
        raise AnywidthError(
            f"samples={samples!r}: with forward= no samples are counted; pass a shorter loader, "
            "such as itertools.islice(loader, 10)"
        )
    if not is_number(momentum) or not 0 < momentum <= 1:
        raise AnywidthError(f"momentum={momentum!r}: expected a number above 0, at most 1")


def _store(model: nn.Module, configs: Iterable[ChannelConfig], fresh: Fresh) -> None:
    """Keep new statistics; they belong to the present weights."""
    state = state_of(network_in(model))
    made_with = state.weights.fingerprint()
    for config, (norm, record) in itertools.product(configs, norm_records(model).items()):
        entry, is_full = fresh[config][norm], config == state.plan.full
        if not entry.num_batches_tracked:  # no pass used it, as in heads for training
            if is_full or record.is_ready(config):
                continue
            with at_width(model, config):  # the first channels of the full width's
                for name in ("running_mean", "running_var"):
                    values = record.sliced(norm, name)
                    if values is not None:
                        getattr(entry, name).copy_(values)
        entry.ready, entry.made_with = True, made_with
        if not is_full:
            record.file(config, entry)
            continue
        record.lacks_full = False
        for name in RUNNING:  # the buffers, which are in `state_dict`
            buffer = norm._buffers[name]
            if buffer is not None:
                buffer.copy_(getattr(entry, name))


def calibrated_widths(model: nn.Module) -> list[Width]:
    """The widths that can be evaluated: a fraction if the user named one, else a configuration.

    A network without batch norm can be evaluated at every width; for it the list is empty.
    """
    plan = plan_of(model)
    records = list(norm_records(model).values())
    if not records:
        return []
    bank = records[0].bank
    ready = [(c, e) for c, e in bank.items() if all(r.is_ready(c) for r in records)]
    found: list[Width] = [*sorted(e.label for _, e in ready if e.label is not None)]
    found += [c for c, e in ready if e.label is None]
    if not any(r.lacks_full for r in records):
        found.append(1.0 if plan.widths.high == 1.0 else plan.full)
    return found


def is_full_width_new(model: nn.Module) -> bool:
    """Whether the full width's statistics are those that a new network starts with.

    They stay like that if training leaves out the full width.
    """
    return any(is_initial(norm) for norm in list(norm_records(model))[:1])


def empty_statistics(
    model: nn.Module, config: ChannelConfig, label: float | None = None
) -> dict[nn.Module, Statistics]:
    norms = norm_records(model)
    with at_width(model, config):
        found = {norm: new_statistics(norm, label, is_tracked=True) for norm in norms}
    for norm, record in norms.items():
        # A scale and bias that were tuned with other weights do not fit these.
        if config in record.bank and record.bank[config].affine and record.is_ready(config):
            found[norm].affine = record.bank[config].affine
    return found


@contextlib.contextmanager
def _finding_last_norm(model: nn.Module, weights: Weights, is_first: bool) -> Iterator[None]:
    """Find the parameters of layers that run after every norm: no statistics depend on them."""
    calls: list[nn.Module] = []
    if not is_first:
        yield
        return
    with register_module_forward_pre_hook(lambda module, _: calls.append(module)):
        yield
    places = [i for i, module in enumerate(calls) if norm_record(module) is not None]
    last = max(places, default=len(calls))
    after = set(calls[last:]) - set(calls[: last + 1])
    weights.after_norms = frozenset(
        f"{path}.{name}"
        for path, module in (weights.root or model).named_modules()
        for name in (module._parameters if module in after else ())
    )
    weights.forget()


@contextlib.contextmanager
def collecting(model: nn.Module, fresh: Fresh) -> Iterator[None]:
    """Norms are in training mode and write to new statistics; all else is in evaluation mode."""
    norms = norm_records(model)
    before = {n: (record.bank, dict(n._buffers), n.momentum) for n, record in norms.items()}
    state = state_of(network_in(model))
    with at_width(model, state.width), evaluating(model), set_on_norms(model, "is_calibrating"):
        for norm, record in norms.items():
            norm.train()
            record.bank = {config: entries[norm] for config, entries in fresh.items()}
            if state.plan.full in record.bank:
                full = record.bank[state.plan.full]
                norm._buffers.update({name: getattr(full, name) for name in RUNNING})
        try:
            yield
        finally:
            for norm, record in norms.items():
                record.bank, buffers, norm.momentum = before[norm]
                norm._buffers.update(buffers)


class _NormHooks(contextlib.ExitStack):
    """Hooks of norms that do not count and weigh their batches as they should.

    Instance norms count none. Norms that one pass uses several times need a share of each use in
    their averages. All others get no hooks, because with hooks a GPU would not use its kernels.
    """

    def __init__(self, norms: Norms, momentum: float | None) -> None:
        super().__init__()
        self._momentum = momentum
        self._seen: dict[tuple[nn.Module, ChannelConfig | None], int] = {}
        self._hook((norm for norm in norms if isinstance(norm, _InstanceNorm)), _count)

    def found_repeated(self, norms: Norms) -> bool:
        """Whether a pass uses norms several times; call it after the first pass."""
        repeated = [norm for norm in norms if int(norm.num_batches_tracked) > 1]  # type: ignore[arg-type]
        self.weigh(repeated)
        return bool(repeated)

    def weigh(self, norms: Iterable[nn.Module]) -> None:
        self._hook(norms, self._weigh)

    def _hook(self, norms: Iterable[nn.Module], hook: Callable[..., None]) -> None:
        for norm in norms:
            self.enter_context(norm.register_forward_pre_hook(hook))

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


def _count(norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    norm.num_batches_tracked.add_(1)  # type: ignore[operator]


def _share(
    model: nn.Module,
    labels: Mapping[ChannelConfig, float | None],
    fresh: Fresh,
    group: dist.ProcessGroup,
) -> None:
    """Send the statistics of each width from the rank that computed them to all others."""
    for number, (config, label) in enumerate(labels.items()):
        if config not in fresh:
            fresh[config] = empty_statistics(model, config, label)
        for entry in fresh[config].values():
            for tensor in entry.tensors():
                dist.broadcast(tensor, group=group, group_src=number % group.size())


def _check_finite(
    model: nn.Module, labels: Mapping[ChannelConfig, float | None], fresh: Fresh
) -> None:
    paths = {module: path for path, module in model.named_modules()}
    everything = ((c, norm, entry) for c in fresh for norm, entry in fresh[c].items())
    for config, norm, entry in everything:
        if not (entry.running_mean.isfinite() & entry.running_var.isfinite()).all():
            width = config if labels[config] is None else f"width {labels[config]}"
            raise AnywidthError(
                f"calibrate(): statistics of {paths[norm]!r} at {width} are NaN or infinite, so "
                "nothing was stored: look for such values in the batches and in the network's "
                "parameters"
            )


def average_statistics(model: nn.Module) -> None:
    """Average tracked batch-norm statistics over ranks, so that all validate the same network."""
    tensors = [b for b in model.buffers() if b.is_floating_point()]
    for entry in tracked_statistics(model):
        tensors += [entry.running_mean, entry.running_var]
    average(tensors)
