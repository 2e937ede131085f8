"""The output of a network as plain containers of tensors, to export and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import tree_leaves

# Caches for the next call of the network, whose sizes are not compared.
CACHES = ("past_key_values", "past_key_value", "cache_params")
# Inputs of the last layer, which gives the logits.
HIDDEN = (
    "hidden_states",
    "last_hidden_state",
    "encoder_last_hidden_state",
    "encoder_hidden_states",
    "decoder_hidden_states",
    "intermediate_hidden_states",
    "text_model_output",
    "vision_model_output",
    "router_logits",
    "image_hidden_states",
)
# States for the next call in the output classes of transformers; elsewhere they are results.
STATES = ("state", "mems")


def plain_output(output: Any, hidden: bool = False) -> Any:
    """Dataclasses and mappings as dicts; parts that are no result of the network as None.

    These are keys and values cached for the next token, and hidden states next to logits, unless
    `hidden` asks for them.
    """
    if isinstance(output, Mapping):
        inner = {*CACHES, *([] if hidden else hidden_names(output))}
        return {k: None if k in inner else plain_output(v, hidden) for k, v in output.items()}
    if isinstance(output, list | tuple):
        return [plain_output(item, hidden) for item in output]
    if is_cache(output):
        return None
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = [field.name for field in dataclasses.fields(output)]
        return plain_output({name: getattr(output, name, None) for name in fields}, hidden)
    return output


def hidden_names(output: Any) -> list[str]:
    """The names of hidden states that a network returns next to its logits."""
    names = list(output) if isinstance(output, Mapping) else []
    if not any(str(name).startswith("logits") for name in names):
        return []
    known = (*HIDDEN, *STATES) if dataclasses.is_dataclass(output) else HIDDEN
    return [name for name in names if name in known and output[name] is not None]


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values, of which there are many classes."""
    return any(kind.__name__.endswith("Cache") for kind in type(value).__mro__)


def output_leaves(output: Any, hidden: bool = False) -> list[Any]:
    """The tensors and other values in the output of a network, without None."""
    return [leaf for leaf in tree_leaves(plain_output(output, hidden)) if leaf is not None]
