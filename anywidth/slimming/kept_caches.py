"""Caches of keys and values: one width does not continue the cache of another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.planning.model_outputs import is_cache
from anywidth.width import ChannelConfig

# On a cache: the configuration that the network had when it filled it.
MARK = "made_at"


def check_caches(arguments: Iterable[Any], config: ChannelConfig, plan: Plan) -> None:
    """Refuse a cache among the arguments of a pass that another width has filled."""
    for cache in _caches(arguments):
        made_at = vars(cache).get(MARK, config)
        if made_at != config and cache.get_seq_length() > 0:
            raise AnywidthError(
                f"this {type(cache).__name__} holds keys and values of another width: "
                f"{plan.fraction(made_at):.3g} of the channels, and the network now runs with "
                f"{plan.fraction(config):.3g}. Start with an empty cache, or keep the whole "
                "generation inside one anywidth.at_width(model, width). To mix widths on purpose, "
                f"del cache.{MARK} first"
            )
        vars(cache)[MARK] = config


def mark_caches(output: Any, config: ChannelConfig) -> None:
    """Note the width at which the caches in the output of a pass were filled."""
    parts = output.values() if isinstance(output, Mapping) else output
    for cache in _caches(parts if isinstance(parts, Iterable) else ()):
        vars(cache)[MARK] = config


def _caches(values: Iterable[Any]) -> Iterator[Any]:
    """The caches among some values that know their length."""
    for value in values if not hasattr(values, "shape") else ():
        if is_cache(value) and hasattr(value, "get_seq_length") and hasattr(value, "__dict__"):
            yield value
