"""The batch-norm statistics of all widths, to be stored: as tensors, or as tensors and a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import anywidth.json_values as values
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import plan_of
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.layers import allow_tuned
from anywidth.slimming.norm_statistics import RUNNING, Affine, norm_records
from anywidth.slimming.state import state_of
from anywidth.training.calibration import Fresh, empty_statistics
from anywidth.width import ChannelConfig

# The name of the list of widths, which is stored as a tensor of the bytes of its JSON text.
_TEXT = "widths"
_AFFINE = ("weight", "bias")


def statistics_state(model: nn.Module) -> dict[str, Tensor]:
    """The statistics of all widths except the full one, whose are in `model.state_dict()`.

    The result has only tensors, so `torch.load(..., weights_only=True)` can read it. As in a
    `state_dict`, the tensors are the network's own, not copies.

    Example:
        >>> checkpoint = {
        ...     "model": model.state_dict(), "statistics": anywidth.statistics_state(model)
        ... }
        >>> model.load_state_dict(checkpoint["model"])  # first: new weights end statistics
        >>> anywidth.load_statistics_state(model, checkpoint["statistics"])
    """
    tensors, text = statistics_to_tensors(model)
    return {_TEXT: torch.tensor(list(text[_TEXT].encode()), dtype=torch.uint8), **tensors}


def load_statistics_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the statistics of a network by those that `statistics_state` returned.

    Args:
        model: a network with the same layers, converted with the same plan. Load its weights
            first.
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


def statistics_to_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The statistics of all widths except the full one: named tensors, and the list of widths.

    Those of the full width are in `model.state_dict()`.
    """
    network_in(model)
    tensors: dict[str, Tensor] = {}
    order: dict[ChannelConfig, int] = {}
    widths: list[dict[str, Any]] = []
    paths = {module: path for path, module in model.named_modules()}
    for norm, record in norm_records(model).items():
        path = paths[norm]
        for config, entry in record.bank.items():
            if config not in order:
                order[config] = len(order)
                about = {"width": entry.label, "ready": record.is_ready(config)}
                widths.append({**about, "channels": config.to_json()})
            for name in RUNNING:
                tensors[f"{order[config]}/{path}.{name}"] = getattr(entry, name)
            if entry.affine is not None and widths[order[config]]["ready"]:
                for name, tensor in entry.affine.tensors().items():
                    tensors[f"{order[config]}/{path}.{name}"] = tensor.detach()
    return tensors, {"widths": json.dumps(widths)}


def load_statistics(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Replace the statistics of a network by the result of `statistics_to_tensors`.

    Load the weights first, because new weights end statistics.
    """
    put_statistics(model, read_statistics(model, tensors, metadata))


_WIDTHS = values.listed(
    values.record(
        {
            "width": values.optional(values.number),
            "ready": values.flag,
            "channels": ChannelConfig.from_json,
        }
    )
)


def read_statistics(
    model: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Fresh:
    """Check that statistics fit the network, and return them for `put_statistics`."""
    plan = plan_of(model)
    try:
        widths = _WIDTHS(json.loads(metadata["widths"]), "widths")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise AnywidthError(f"these are not batch-norm statistics of anywidth: {error}") from error
    paths = {module: path for path, module in model.named_modules()}
    loaded: Fresh = {}
    for number, width in enumerate(widths):
        config = width["channels"]
        plan.check(config)
        loaded[config] = empty_statistics(model, config)
        for norm, statistics in loaded[config].items():
            path = paths[norm]
            statistics.label, statistics.ready = width["width"], width["ready"]
            for name in RUNNING:
                given, held = tensors.get(f"{number}/{path}.{name}"), getattr(statistics, name)
                if given is None:
                    raise AnywidthError(f"statistics of {path!r} are missing for {config}")
                is_alike = given.is_floating_point() == held.is_floating_point()
                if not is_alike or given.shape != held.shape:
                    raise AnywidthError(
                        f"statistics of {path!r} do not fit {config}: {name} has shape "
                        f"{tuple(given.shape)} and {given.dtype}, expected {tuple(held.shape)} and "
                        f"{held.dtype}"
                    )
                held.copy_(given)
            prefix = f"{number}/{path}."
            statistics.affine = _read_affine(norm, prefix, tensors, len(statistics.running_mean))
    return loaded


def is_affine(name: str) -> bool:
    """Whether a tensor of stored statistics is a scale or bias that was tuned for its width."""
    return name.rpartition(".")[2] in _AFFINE


def _read_affine(
    norm: nn.Module, prefix: str, tensors: Mapping[str, Tensor], size: int
) -> Affine | None:
    """The tuned scale and bias of a norm; None if it has none."""
    given = {name: tensors[prefix + name] for name in _AFFINE if prefix + name in tensors}
    scale = norm._parameters.get("weight")
    for name in _AFFINE if given else ():
        if (name in given) != (norm._parameters.get(name) is not None):
            raise AnywidthError(
                f"{prefix}{name}: a tuned scale needs its bias, and a norm that has both"
            )
    for name, tensor in given.items():
        if tuple(tensor.shape) != (size,) or not tensor.is_floating_point():
            raise AnywidthError(
                f"{prefix}{name} has shape {tuple(tensor.shape)}: expected {size} numbers"
            )
    if scale is None or not given:
        return None
    own = {name: tensor.detach().to(scale).clone() for name, tensor in given.items()}
    return Affine(own["weight"], own.get("bias"))


def put_statistics(model: nn.Module, loaded: Fresh) -> None:
    """Replace the statistics of a network, which then belong to its present weights."""
    made_with = state_of(network_in(model)).weights.fingerprint()
    for norm, record in norm_records(model).items():
        for config in set(record.bank) - set(loaded):
            del record.bank[config]
        for config, entries in loaded.items():
            entries[norm].made_with = made_with
            record.file(config, entries[norm])
        if any(entry.affine is not None for entry in record.bank.values()):
            allow_tuned(norm, record)
