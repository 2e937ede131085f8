"""The weights a run starts with: those of a file, or residual branches that begin at zero."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError, misfits
from anywidth.files import decode_tensors, read_bytes, read_json
from anywidth.planning.groups import Plan
from anywidth.planning.trace.residual_norms import residual_scales
from anywidth.slimming.sorting import sort_channels

# Where training programs put the weights among other things.
_PARTS = ("state_dict", "model_state_dict", "model")
# What wrappers put before the names.
_WRAPPERS = ("module.", "_orig_mod.")


def load_starting_weights(model: nn.Module, file: str | Path) -> None:
    """Load a checkpoint of the same network, trained ordinarily, before it is converted."""
    path = Path(file)
    weights, held = read_weights(path), model.state_dict()
    # Files of old networks do not count batches, which changes nothing.
    counts = {name: held[name] for name in held if name.endswith("num_batches_tracked")}
    if wrong := misfits({**counts, **weights}, held):
        raise AnywidthError(
            f"--from-checkpoint {path}: its weights do not fit this {type(model).__name__} "
            f"({wrong}); give the --model and --data that it was trained with"
        )
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise AnywidthError(f"--from-checkpoint {path}: {name} is not finite")
    model.load_state_dict({**held, **weights})


def sort_starting_channels(model: nn.Module, plan: Plan, file: str | Path) -> None:
    """Put the most important channels first; the output at full width stays the same."""
    run = Path(file).parent / "config.json"
    if run.is_file() and read_json(run).get("method") in ("us", "s"):
        raise AnywidthError(
            f"--from-checkpoint {file}: its narrow widths are trained, and another order of the "
            "channels would end them; leave the order as it is: --no-sort-channels"
        )
    try:
        sort_channels(model, plan)
    except AnywidthError as error:
        raise AnywidthError(f"{error}; or leave the order as it is: --no-sort-channels") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file of safetensors, or of `torch.save`; no code in it is executed."""
    content = read_bytes(path)
    found: Any
    # A file of `torch.save` is a zip archive, or in old versions a pickle.
    if content[:2] == b"PK" or content[:1] == b"\x80":
        found = _unpickled(content, path)
    else:
        found, about = decode_tensors(content, path)
        if "plan" in about:
            raise AnywidthError(
                f"--from-checkpoint {path}: a file of anywidth.save holds a network that is "
                "slimmable already: load it with anywidth.load, or continue its run with --resume"
            )
    for part in _PARTS:
        if isinstance(found, Mapping) and isinstance(found.get(part), Mapping):
            found = found[part]
    is_named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not is_named or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise AnywidthError(
            f"--from-checkpoint {path}: expected a state_dict, tensors by name, or one under "
            f"{', '.join(map(repr, _PARTS))}"
        )
    weights = dict(found)
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _unpickled(content: bytes, path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise AnywidthError(
            f"--from-checkpoint {path}: cannot be read as tensors alone ({lines[0]}); save the "
            "weights with torch.save(model.state_dict(), FILE)"
        ) from error


def scales_to_zero(model: nn.Module, example: Tensor) -> list[str]:
    """The scales at the end of residual branches, by name; found before the network is converted.

    They are set to zero after that, because verification sees little of branches that are zero.
    """
    scales = residual_scales(model, (example,))
    if not scales:
        raise AnywidthError(
            f"zero_gamma: {type(model).__name__} has no residual branch that ends in batch norm; "
            "leave out --zero-gamma"
        )
    return scales
