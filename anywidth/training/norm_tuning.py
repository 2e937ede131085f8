"""Scale and bias of batch norms for chosen widths, trained after all weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.distributed import check_not_sharded
from anywidth.errors import AnywidthError
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width, plan_of
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.layers import allow_tuned
from anywidth.slimming.norm_statistics import (
    Affine,
    MissingStatisticsError,
    scaled_norms,
)
from anywidth.slimming.state import check_layers, state_of
from anywidth.training.calibration import Norms, calibrate, collecting, empty_statistics
from anywidth.training.calibration_batches import moved
from anywidth.training.distillation import Distill
from anywidth.training.engine.passes import Loss, Objective, detached
from anywidth.training.engine.trees import call
from anywidth.training.step_checks import check_share, distillation_for, inputs_kept
from anywidth.width import ChannelConfig, Width, check_whole, is_number, width_list

Affines = dict[ChannelConfig, dict[nn.Module, Affine]]


def tune_norms(
    model: nn.Module,
    loader: Iterable[tuple[Any, Any]],
    widths: Sequence[Width],
    loss: Loss,
    distill: Distill | None = None,
    *,
    epochs: int = 1,
    learning_rate: float = 1e-3,
    truth: float = 0.0,
    calibration: Iterable[Any] | None = None,
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Train the scale and bias of every batch norm for some widths, and keep them for these.

    Weights and other widths do not change. These widths then have private scales and biases, like
    the switches of a slimmable network. They are stored with the statistics, which are computed
    again: in `anywidth.save`, `statistics_state`, `extract` and exported files. Like statistics,
    they belong to the weights: more training ends them.

    Args:
        model: a converted network, or a model with one in it.
        loader: (inputs, targets) batches of training data, as for `SandwichStep`; it is read once
            per epoch.
        widths: fractions or `ChannelConfig`s, all calibrated; not the full width, whose scale and
            bias are the network's own.
        loss: (output, targets) → scalar.
        distill: (output, full width's output) → scalar, as for `SandwichStep`; None tunes with the
            true targets.
        epochs: passes over the loader.
        learning_rate: of Adam; it falls to 0 if the loader has a length.
        truth: share of the true targets in the loss, with a distillation.
        calibration: batches for `anywidth.calibrate` afterwards; the loader if not given.
        autocast: run forward passes in this dtype.
        progress: called after each batch with the number of batches so far.

    After an error, the network is unchanged.

    Example:
        >>> anywidth.calibrate(model, loader, widths=[0.25, 0.5])
        >>> anywidth.tune_norms(model, loader, [0.25, 0.5], F.cross_entropy)
    """
    network = network_in(model)
    check_layers(network)
    check_not_sharded(model, "tune_norms")
    named = {state_of(network).resolve(w): w for w in width_list(widths, "tune_norms")}
    norms = _tunable(model)
    _check(model, norms, named)
    check_whole(epochs, 1, "epochs")
    if not is_number(learning_rate) or learning_rate <= 0:
        raise AnywidthError(f"learning_rate={learning_rate!r}: expected a number above 0")
    check_share(truth)
    objective = Objective(loss, distillation_for(loss, distill), truth, autocast)
    if iter(loader) is loader:
        raise AnywidthError(
            "tune_norms() reads its loader several times, and this one can be read once: pass a "
            "DataLoader or a list of batches"
        )
    for norm, record in norms.items():
        allow_tuned(norm, record)
    tuned = _started(model, norms, list(named))
    _train(model, loader, objective, tuned, epochs, learning_rate, progress)
    before = {c: {norm: record.bank[c].affine for norm, record in norms.items()} for c in tuned}
    try:
        _put(norms, tuned)
        calibrate(model, loader if calibration is None else calibration, list(named.values()))
    except BaseException:
        _put(norms, before)
        raise


def _put(norms: Norms, affines: Mapping[ChannelConfig, Mapping[nn.Module, Affine | None]]) -> None:
    for config, by_norm in affines.items():
        for norm, affine in by_norm.items():
            norms[norm].bank[config].affine = affine


def _tunable(model: nn.Module) -> Norms:
    """The norms with a scale; each must have its own."""
    scaled = scaled_norms(model)
    if not scaled:
        raise AnywidthError("this network has no batch norm with a scale: there is nothing to tune")
    uses = Counter(id(norm._parameters["weight"]) for norm in scaled)
    for path, module in model.named_modules():
        if module in scaled and uses[id(module._parameters["weight"])] > 1:
            raise AnywidthError(
                f"{path!r} shares its scale with another norm, so it cannot have one of its own"
            )
    return scaled


def _check(model: nn.Module, norms: Norms, named: Mapping[ChannelConfig, Width]) -> None:
    full = plan_of(model).full
    for config, width in named.items():
        if config == full:
            raise AnywidthError(
                "tune_norms(): the full width's scales and biases are the network's own, which "
                "other widths use too: leave 1.0 out"
            )
        for record in norms.values():
            if not record.is_ready(config):
                with at_width(model, width):
                    raise MissingStatisticsError(f"tune_norms(): {record.missing()}")


@torch.no_grad()
def _started(model: nn.Module, norms: Norms, configs: Sequence[ChannelConfig]) -> Affines:
    """Copies of the scales and biases that the widths use now."""
    found: Affines = {}
    with evaluating(model):
        for config in configs:
            with at_width(model, config):
                found[config] = {
                    norm: Affine(*map(_leaf, (norm.weight, norm.bias)))  # type: ignore[arg-type]
                    for norm in norms
                }
    return found


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def _train(
    model: nn.Module,
    loader: Iterable[tuple[Any, Any]],
    objective: Objective,
    tuned: Affines,
    epochs: int,
    learning_rate: float,
    progress: Callable[[int], None] | None,
) -> None:
    by_config = {
        config: [tensor for one in affines.values() for tensor in one.tensors().values()]
        for config, affines in tuned.items()
    }
    optimizer = torch.optim.Adam([t for one in by_config.values() for t in one], learning_rate)
    total = epochs * len(loader) if isinstance(loader, Sized) else None
    device = next(model.parameters()).device
    full, done = plan_of(model).full, 0
    fresh = {config: empty_statistics(model, config) for config in tuned}
    for config, affines in tuned.items():
        for norm, entry in fresh[config].items():
            entry.is_tracked, entry.affine = False, affines.get(norm)
    with collecting(model, fresh), torch.enable_grad():
        for _ in range(epochs):
            first = done
            for inputs, targets in loader:
                inputs, targets = moved(inputs, device), moved(targets, device)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * (1 if total is None else 1 - done / total)
                teacher = None
                if objective.distill is not None:
                    with torch.no_grad(), evaluating(model), at_width(model, full):
                        teacher = detached(call(model, inputs))
                for config, tensors in by_config.items():
                    with inputs_kept(inputs):
                        found, _ = objective.forward(model, config, inputs, targets, teacher)
                    gradients = torch.autograd.grad(found, tensors, allow_unused=True)
                    for tensor, gradient in zip(tensors, gradients, strict=True):
                        tensor.grad = gradient
                optimizer.step()
                done += 1
                if progress is not None:
                    progress(done)
            if done == first:
                raise AnywidthError("tune_norms() got no data: the loader is empty")
    for affine in (affine for affines in tuned.values() for affine in affines.values()):
        for name, tensor in affine.tensors().items():
            setattr(affine, name, tensor.detach())
            if not tensor.isfinite().all():
                raise AnywidthError(
                    f"tuning diverged with learning_rate={learning_rate}, so nothing was kept: "
                    "lower it"
                )
