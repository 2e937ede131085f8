"""The hooks of a converted network, which remember the width of each pass.

Backward computes activations again at the width of the forward: `torch.utils.checkpoint` runs parts
of a network again in the backward pass, when the network may have another width. And one width does
not continue the cache of keys and values that another has filled.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from anywidth.errors import AnywidthError
from anywidth.planning.groups import Plan
from anywidth.planning.model_outputs import is_cache
from anywidth.slimming.record import network_state
from anywidth.slimming.thread_use import Thread
from anywidth.slimming.unsupported_tools import check_not_traced, warn_if_not_compiled
from anywidth.width import ChannelConfig

# On a cache: the configuration that the network had when it filled it.
MARK = "made_at"


def hook_passes(network: nn.Module) -> None:
    """Let a converted network remember the width of each pass, also in the caches it fills."""
    network.register_forward_pre_hook(_begin_pass, with_kwargs=True)
    network.register_forward_hook(_end_pass)


def unhook_passes(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [n for n, hook in hooks.items() if hook in (_begin_pass, _end_pass)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _end_pass(network: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Set the width when backward reaches the outputs, before it computes anything again."""
    state = None if is_compiling() else network_state(network)
    if state is None:
        return
    config, thread = state.config, state.use.thread()
    _mark_caches(output, config)
    if not _is_in_backward():
        state.use.end_pass()
    if torch.is_grad_enabled():
        nodes = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for node in filter(None, nodes):
            node.register_prehook(partial(_set_in_backward, network, config, thread))
    elif network.training:
        _keep_width_in_checkpoint(network, config, thread)


def _set_in_backward(
    network: nn.Module, config: ChannelConfig, thread: Thread, gradients: Any
) -> None:
    state: Any = network_state(network)
    if state.config == config:
        return
    before = state.before_backward
    if before is None:
        before = state.width
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end_backward, network, thread))
    state.set(network, config, thread)
    state.before_backward = before


def _end_backward(network: nn.Module, thread: Thread | None = None) -> None:
    """Set the width that the network had before backward, unless it was set since."""
    state: Any = network_state(network)
    if state.before_backward is not None:
        state.set(network, state.before_backward, thread)


def _begin_pass(network: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    state = None if is_compiling() else network_state(network)
    if state is None:
        return
    if not _is_in_backward():
        check_not_traced()
        warn_if_not_compiled()
        _end_backward(network)  # it may have failed, which PyTorch does not report
        with state.use.lock:
            state.use.begin_pass(state.config)
        if network.training:
            state.weights.trainings.count += 1
    _check_caches((*arguments, *named.values()), state.config, state.plan)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _keep_width_in_checkpoint(network: nn.Module, config: ChannelConfig, thread: Thread) -> None:
    """Keep the width for a reentrant checkpoint, whose outputs have no backward pass to hook."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is CheckpointFunction.forward.__code__:
            context = frame.f_locals["ctx"]
            context.run_function = partial(_run_at, network, config, thread, context.run_function)


def _run_at(
    network: nn.Module,
    config: ChannelConfig,
    thread: Thread,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    state: Any = network_state(network)
    with state.at(network, config, thread):
        return function(*arguments)


# ---- caches of keys and values ------------------------------------------------------------------


def _check_caches(arguments: Iterable[Any], config: ChannelConfig, plan: Plan) -> None:
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


def _mark_caches(output: Any, config: ChannelConfig) -> None:
    """Note the width at which the caches in the output of a pass were filled."""
    parts = output.values() if isinstance(output, Mapping) else output
    for cache in _caches(parts if isinstance(parts, Iterable) else ()):
        vars(cache)[MARK] = config


def _caches(values: Iterable[Any]) -> Iterator[Any]:
    """The caches among some values that know their length."""
    for value in values if not hasattr(values, "shape") else ():
        if is_cache(value) and hasattr(value, "get_seq_length") and hasattr(value, "__dict__"):
            yield value
