"""A converted network on disk: one file with the weights and the statistics of all widths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from anywidth.distributed import check_not_sharded
from anywidth.errors import AnywidthError, errors_about, misfits
from anywidth.files import load_tensors, save_tensors
from anywidth.planning.groups import Plan
from anywidth.planning.parts import ChannelGroup
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.state import state_of
from anywidth.training.statistics_state import (
    is_affine,
    put_statistics,
    read_statistics,
    statistics_to_tensors,
)

# Version 2 has scales and biases that were tuned per width; without any, a file is of version 1.
_VERSION, _WITH_TUNED = "1", "2"
_WEIGHTS, _STATISTICS = "weights/", "statistics/"


def save(model: nn.Module, path: str | Path) -> None:
    """Write a converted network to one file: the weights and the statistics of all widths.

    `state_dict` only holds the statistics of the full width; this keeps every calibrated width.
    The file is safetensors, written beside `path` and then renamed, so that `path` is never half
    written. With several processes, call it in one of them.

    Args:
        model: a converted network, or a model with one in it; it is not changed.
        path: the file; its folder must exist. An existing file is replaced.

    Example:
        >>> anywidth.calibrate(model, loader, widths=[0.25, 0.5, 1.0])
        >>> anywidth.save(model, "network.safetensors")
    """
    state = state_of(network_in(model))
    check_not_sharded(model, "save")
    statistics, widths = statistics_to_tensors(model)
    tensors = {
        **{_WEIGHTS + name: tensor for name, tensor in model.state_dict().items()},
        **{_STATISTICS + name: tensor for name, tensor in statistics.items()},
    }
    about = {
        "anywidth": _WITH_TUNED if any(map(is_affine, statistics)) else _VERSION,
        "plan": json.dumps(state.plan.to_json()),
        "average_outputs": json.dumps(state.average_outputs),
        **widths,
    }
    save_tensors(path, tensors, about)


def load(model: nn.Module, path: str | Path) -> None:
    """Read a file of `anywidth.save` into a network that was converted in the same way.

    Weights and statistics are replaced; the width and the training or evaluation mode stay. No
    code in the file is ever executed. After an error the network is unchanged.

    Args:
        model: a network with the same layers, converted with the same plan and width range.
        path: the file.

    Example:
        >>> model = anywidth.slimmable(build(), example_input=torch.randn(2, 3, 224, 224))
        >>> anywidth.load(model, "network.safetensors")
        >>> anywidth.calibrated_widths(model)
        [0.25, 0.5, 1.0]
    """
    state = state_of(network_in(model))
    path = Path(path)
    tensors, about = load_tensors(path)
    _check_version(path, about.get("anywidth"))
    weights = _under(_WEIGHTS, tensors)
    if wrong := misfits(weights, model.state_dict()):
        raise AnywidthError(f"{path}: saved from another network; its weights: {wrong}")
    try:
        plan = Plan.from_json(json.loads(about["plan"]))
        average_outputs = json.loads(about["average_outputs"])
    except (KeyError, ValueError) as error:
        raise AnywidthError(f"{path}: its plan cannot be read ({error})") from error
    _check_plan(path, plan, state.plan)
    if average_outputs != state.average_outputs:
        raise AnywidthError(
            f"{path}: saved with average_outputs={average_outputs}; convert with "
            f"anywidth.slimmable(model, plan, average_outputs={average_outputs})"
        )
    with errors_about(path):
        statistics = read_statistics(model, _under(_STATISTICS, tensors), about)
    model.load_state_dict(weights)
    put_statistics(model, statistics)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _check_version(path: Path, version: str | None) -> None:
    if version is None:
        raise AnywidthError(
            f"{path}: not a file of anywidth.save; load the tensors of a state_dict with "
            "model.load_state_dict"
        )
    if version not in (_VERSION, _WITH_TUNED):
        raise AnywidthError(
            f"{path}: saved in version {version} of the format; this version of anywidth reads "
            f"versions {_VERSION} and {_WITH_TUNED}"
        )


def _check_plan(path: Path, saved: Plan, ours: Plan) -> None:
    """Compare the parts that decide the channels of a width; notes and reasons may differ."""
    if saved.widths != ours.widths:
        raise AnywidthError(
            f"{path}: saved from a network with {saved.widths}; this network has {ours.widths}; "
            f"convert with anywidth.slimmable(model, plan, anywidth.{saved.widths})"
        )
    for name in [*saved.groups, *ours.groups]:
        before, now = _rules(saved.groups.get(name)), _rules(ours.groups.get(name))
        if before != now:
            raise AnywidthError(
                f"{path}: saved with another plan: group {name!r} has {before} in the file and "
                f"{now} here; convert with the plan that the saved network had"
            )
    for name, axes in saved.tensors.items():
        if axes != ours.tensors.get(name):
            raise AnywidthError(
                f"{path}: saved with another plan, which narrows {name!r} in another way; convert "
                "with the plan that the saved network had"
            )


def _rules(group: ChannelGroup | None) -> dict[str, Any] | None:
    if group is None:
        return None
    rules = {"channels": group.channels, "unit": group.unit, "divisor": group.divisor}
    return {**rules, "fixed": group.fixed is not None, "tied": group.tied}
