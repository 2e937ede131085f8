"""Find the operations at which a narrower copy of a network failed."""

from __future__ import annotations

import traceback
from collections.abc import Container, Iterable, Iterator

from torch import nn
from torch.fx import Node

from anywidth.planning.trace.nodes import layer_of, op_name
from anywidth.planning.trace.rules.table import PRODUCTS
from anywidth.planning.trace.written_names import last_line


def blamed_guesses(
    error: BaseException, narrow: nn.Module, nodes: Iterable[Node], guessed: Iterable[Node]
) -> list[Node]:
    """Guessed operations that an error points to: those of the failing line, in the same class.

    If there are none, those whose results reach the line without a product in between, and those
    of their lines in other modules.
    """
    guesses = set(guessed)
    frames = traceback.extract_tb(error.__traceback__)
    reached = [(frame.filename, frame.lineno or 0) for frame in frames]
    module = _failing_module(error, narrow)
    modules = {node: narrow.get_submodule(layer_of(node)) for node in nodes}
    lines = {n: last_line(n) for n, own in modules.items() if type(own) is type(module)}
    for line in reversed(reached):
        failing = [node for node in lines if lines[node] == line]
        found = [node for node in failing if node in guesses]
        if found:
            return found
        if not failing:
            continue
        # torch's layers are everywhere, and most of them have nothing to do with it.
        is_common = type(module).__module__.startswith("torch.")
        here = [n for n in failing if modules[n] is module] if is_common else failing
        places = {(type(modules[n]), last_line(n)) for n in _sources(here, guesses)}
        own = [n for n in modules if n in guesses]
        return [n for n in own if (type(modules[n]), last_line(n)) in places]
    return []


def earlier_guesses(
    blamed: Iterable[Node], guessed: Iterable[Node], failed: Container[Node]
) -> list[Node]:
    """The nearest guesses before the blamed ones that are not among those that failed."""
    guesses, reached, last = set(guessed), set(blamed), list(blamed)
    while last:
        last = [node for node in dict.fromkeys(_sources(last, guesses)) if node not in reached]
        reached.update(last)
        if found := [node for node in last if node not in failed]:
            return found
    return []


def _sources(nodes: Iterable[Node], guesses: set[Node]) -> Iterator[Node]:
    """The nearest guesses that nodes depend on."""
    left, seen = list(nodes), set(nodes)
    while left:
        for node in left.pop(0).all_input_nodes:
            if node in guesses:
                yield node
            elif node not in seen and op_name(node.target) not in PRODUCTS:
                seen.add(node)
                left.append(node)


def _failing_module(error: BaseException, model: nn.Module) -> nn.Module:
    """The innermost module that was running."""
    modules = set(model.modules())
    found, trace = model, error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module) and running in modules:
            found = running
        trace = trace.tb_next
    return found
