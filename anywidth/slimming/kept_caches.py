"""Caches of keys and values: one width does not continue the cache of another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from anywidth.errors import AnywidthError
from anywidth.planning.model_outputs import is_cache
from anywidth.slimming.record import record_of

# On a cache: the configuration that the network had when it filled it.
MARK = "made_at"


def hook_caches(network: nn.Module) -> None:
    """Let a converted network mark the caches it fills, and refuse those of other widths."""
    network.register_forward_pre_hook(_check_caches, with_kwargs=True)
    network.register_forward_hook(_mark_caches)


def unhook_caches(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [n for n, hook in hooks.items() if hook in (_check_caches, _mark_caches)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _check_caches(network: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    record = record_of(network)
    if is_compiling() or record is None or record.network is None:
        return
    config = record.network.config
    for cache in _caches((*arguments, *named.values())):
        made_at = vars(cache).get(MARK, config)
        if made_at != config and cache.get_seq_length() > 0:
            plan = record.network.plan
            raise AnywidthError(
                f"this {type(cache).__name__} holds keys and values of another width: "
                f"{plan.fraction(made_at):.3g} of the channels, and the network now runs with "
                f"{plan.fraction(config):.3g}. Start with an empty cache, or keep the whole "
                "generation inside one anywidth.at_width(model, width). To mix widths on purpose, "
                f"del cache.{MARK} first"
            )
        vars(cache)[MARK] = config


def _mark_caches(network: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    record = record_of(network)
    if is_compiling() or record is None or record.network is None:
        return
    parts = output.values() if isinstance(output, Mapping) else output
    for cache in _caches(parts if isinstance(parts, Iterable) else ()):
        vars(cache)[MARK] = record.network.config


def _caches(values: Iterable[Any]) -> Iterator[Any]:
    """The caches among some values that know their length."""
    for value in values if not hasattr(values, "shape") else ():
        if is_cache(value) and hasattr(value, "get_seq_length") and hasattr(value, "__dict__"):
            yield value
