"""Which attributes of modules the sizes of reshapes, splits and new tensors come from.

A graph shows numbers. One run of the network, with attributes that remember where they come from,
shows which of these numbers are an attribute or a multiple of one: `view(b, 2 * self.hidden, -1)`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from anywidth.planning.cuts import copied
from anywidth.planning.held_numbers import held_lists, held_numbers, mentions, set_number
from anywidth.planning.kept_results import results_forgotten
from anywidth.planning.trace.known_ints import KnownFloat, KnownInt, SizeSource
from anywidth.planning.trace.nodes import layer_of, nodes_of, op_name

# Operations that are given the size of each dimension of their result, or of each part.
SHAPED = ("view", "reshape", "zeros", "ones", "empty", "full", "expand", "new_zeros", "new_ones",
          "new_empty", "new_full")  # fmt: skip
SPLIT = ("split", "split_with_sizes")
# These also have arguments before the sizes, and give sizes by dimension only inside them.
UNFLATTENED = "unflatten"
INDEXED = ("__getitem__", "__setitem__")
NUMBERS = (int, float, KnownInt, KnownFloat)
ATTENTION = "multi_head_attention_forward"
# The numbers of torch's layers are known from their weights, but for these.
READ_IN_TORCH = (nn.Unflatten,)


class SizeSources:
    """The sources of the sizes in a network's graphs; each graph's are looked up when needed."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], traced: dict[bool, Any]) -> None:
        self._model, self._inputs, self._traced = model, inputs, traced
        self._recordings: dict[bool, Recording | None] = {}

    @cached_property
    def attentions(self) -> list[AttentionCall]:
        """Attention that the network's own code calls by `multi_head_attention_forward`."""
        if not any(mentions(module, ATTENTION) for module in self._model.modules()):
            return []
        recordings = [self._recording(training) for training in self._traced]
        return [call for one in recordings if one is not None for call in one.attentions]

    def _recording(self, training: bool) -> Recording | None:
        if training not in self._recordings:
            self._recordings[training] = None  # it may run only while it is exported
            with contextlib.suppress(Exception):
                self._recordings[training] = _record(self._model, self._inputs, training)
        return self._recordings[training]

    def of(self, node: Node) -> Sizes:
        """For each size that an operation is given its source; empty if that is not known."""
        return self._by_node.get(node, [])

    @cached_property
    def _by_node(self) -> dict[Node, Sizes]:
        found: dict[Node, Sizes] = {}
        for training, graph in self._traced.items():
            found |= self._matched(training, graph)
        return found

    def of_number(self, node: Node, number: float) -> SizeSource | None:
        """The attribute that a number in an operation was worked out from, if a run showed one."""
        found: set[SizeSource | None] = set()
        for training in self._traced:
            recording = self._recording(training)
            held = recording.numbers.get(layer_of(node), []) if recording is not None else []
            found |= {source for value, source in held if value == number}
        return found.pop() if len(found) == 1 else None

    def _matched(self, training: bool, graph: Any) -> dict[Node, Sizes]:
        """The records of a run for the nodes of the graph: both in order, per module."""
        recording = self._recording(training)
        if recording is None:
            return {}
        records = recording.records
        nodes = defaultdict(list)
        for node in nodes_of(graph.graph_module):
            name = _plain(op_name(node.target))
            if node.op == "call_function" and (layer_of(node), name) in records:
                nodes[layer_of(node), name].append(node)
        return {
            node: record
            for key, found in nodes.items()
            if len(found) == len(records[key])
            for node, record in zip(found, records[key], strict=True)
        }


# The sources of the sizes that one operation is given.
Sizes = list[SizeSource | None]
Records = dict[tuple[str, str], list[Sizes]]


class AttentionCall(NamedTuple):
    """One call of `multi_head_attention_forward`: the names of its weights, by its arguments."""

    path: str
    heads: int
    width: int
    sources: tuple[SizeSource | None, SizeSource | None]
    weights: dict[str, str]


def _record(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> Recording:
    """The sources of the sizes that each module gives, by its path and the operation's name."""
    twin = copied(model, {id(p): p for p in model.parameters()})
    for path, module in twin.named_modules():
        if not type(module).__module__.startswith("torch.nn.") or isinstance(module, READ_IN_TORCH):
            _remember(path, module)
    recording = Recording({id(p): name for name, p in model.named_parameters()})
    for path, module in twin.named_modules():
        module.register_forward_pre_hook(recording.entering(path), prepend=True)
        module.register_forward_hook(recording.leaving, always_call=True)
    twin.train(training)
    with results_forgotten(twin), torch.random.fork_rng(devices=[]), torch.no_grad(), recording:
        twin(*copy.deepcopy(inputs))
    return recording


def _remember(path: str, module: nn.Module) -> None:
    """Let the numbers of a module, and of its configuration, remember where they come from."""
    for name, number in held_numbers(module).items():
        if number > 1:
            set_number(module, name, KnownInt(number, SizeSource(path, name)))
    for name, numbers in held_lists(module).items():
        known = [
            KnownInt(number, SizeSource(path, name, place)) if number > 1 else number
            for place, number in enumerate(numbers)
        ]
        set_number(module, name, known if isinstance(numbers, list) else tuple(known))


class Recording(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.records: Records = defaultdict(list)
        self.attentions: list[AttentionCall] = []
        # Numbers that operations were given in each module, and what they were worked out from.
        self.numbers: dict[str, list[tuple[float, SizeSource | None]]] = defaultdict(list)
        self._names = names
        self._running = [""]  # paths of modules, the innermost last

    def entering(self, path: str) -> Any:
        return lambda module, given: self._running.append(path)

    def leaving(self, module: nn.Module, given: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, path = getattr(func, "__name__", ""), self._running[-1]
        if name not in (*SHAPED, *SPLIT, *INDEXED, UNFLATTENED):
            numbers = [x for x in (*args, *kwargs.values()) if type(x) in NUMBERS]
            self.numbers[path] += [(float(x), getattr(x, "source", None)) for x in numbers]
        if name == ATTENTION:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            self.attentions.append(self._attention(given))
        if name in INDEXED:
            self.records[path, "slice"] += _slices(args[0], args[1])
        if name in SHAPED or name in SPLIT or name == UNFLATTENED:
            sizes = _in_place(name, _sizes(name, args, kwargs), args, kwargs, result)
            self.records[path, _plain(name)].append(sizes)
        return result

    def _attention(self, given: dict[str, Any]) -> AttentionCall:
        heads, width = given["num_heads"], given["query"].shape[-1]
        weights = {
            key: self._names[id(value)] for key, value in given.items() if id(value) in self._names
        }
        sources = _source(heads), _source(given["embed_dim_to_check"])
        return AttentionCall(self._running[-1], int(heads), width, sources, weights)


def _plain(name: str) -> str:
    """One name for an operation under several."""
    return {"split_with_sizes": "split", "reshape": "view"}.get(name, name)


def _sizes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
    """The sources of the sizes among the arguments of an operation."""
    keys = ("size", "shape", "sizes", "split_size_or_sections", "split_size", "split_sizes")
    named = next((kwargs[key] for key in keys if key in kwargs), None)
    is_made = name in ("zeros", "ones", "empty", "full")
    rest = args if is_made else args[2 if name == UNFLATTENED else 1 :]
    given = named if named is not None else rest
    if named is None and rest and isinstance(rest[0], list | tuple):
        given = rest[0]
    elif named is None and (name in SPLIT or name in ("full", "new_full")):
        given = rest[:1]
    return [_source(size) for size in (given if isinstance(given, list | tuple) else [given])]


def _source(number: Any) -> SizeSource | None:
    return number.source if isinstance(number, KnownInt) else None


def _slices(tensor: Tensor, index: Any) -> Iterator[Sizes]:
    """The sources of both ends of every slice that leaves something out."""
    places = index if isinstance(index, tuple) else (index,)
    taken = [p for p in places if p is not None and p is not Ellipsis and not isinstance(p, bool)]
    dim = 0
    for place in places:
        if place is Ellipsis:
            dim = tensor.dim() - len(taken) + dim
        elif isinstance(place, slice):
            size = tensor.shape[dim]
            if range(size)[place] != range(size):
                yield [_source(place.start), _source(place.stop)]
            dim += 1
        elif place is not None:
            dim += place.dim() if isinstance(place, Tensor) and place.dtype == torch.bool else 1


def _in_place(
    name: str, sizes: Sizes, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Sizes:
    """One entry per dimension of the result, or per part."""
    if name in SPLIT:
        return sizes
    rank = result.dim()
    if name == UNFLATTENED:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % (rank - len(sizes) + 1)
        sizes = [*[None] * dim, *sizes, *[None] * (rank - len(sizes) - dim)]
    return sizes if len(sizes) == rank else [None] * rank
