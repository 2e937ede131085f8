"""The configuration of an extracted Hugging Face network, so that it can be saved and loaded.

`save_pretrained` writes a configuration from which `from_pretrained` builds the network. Extraction
searches for a configuration that builds the narrow network. For some networks there is none, and
`save_pretrained` then raises an error. transformers is never imported here: whoever has one of its
networks has imported it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import Plan
from anywidth.planning.held_numbers import held_number
from anywidth.planning.model_outputs import output_leaves
from anywidth.planning.modes import evaluating
from anywidth.planning.part_calls import named_tensors
from anywidth.width import ChannelConfig

# How many configurations are tried; the first fits most networks.
MOST_TRIED = 24
TOLERANCE = 1e-4
# Words in the names of sizes, tried in this order, and the role of the groups that they follow.
# They are only a first guess: the network that a configuration builds decides.
WORDS = {
    "head_dim": None,
    "head_size": None,
    "head": "heads",
    "intermediate": "mlp",
    "ffn": "mlp",
    "inner": "mlp",
    "mlp": "mlp",
    "d_ff": "mlp",
    "hidden_dim": "mlp",
    "hidden_size": "hidden",
    "n_embd": "hidden",
    "d_model": "hidden",
    "dim": "hidden",
}


class Slot(NamedTuple):
    """A size in a configuration, in one of the configurations inside it, or in a list there."""

    owner: tuple[str, ...]
    key: str
    place: int | None
    value: int | None

    def put(self, config: Any, value: int | None) -> None:
        for name in self.owner:
            config = getattr(config, name)
        if self.place is not None:
            values = list(getattr(config, self.key))
            values[self.place] = value
            setattr(config, self.key, values)
        else:
            setattr(config, self.key, value)

    @property
    def role(self) -> str | None:
        return next((role for word, role in WORDS.items() if word in self.key), None)


@dataclass(frozen=True)
class Refusal:
    """Replaces `save_pretrained` of a network that no configuration builds."""

    reason: str

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AnywidthError(self.reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusal:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # As text, so that a pickled network does not depend on this library.
        return str, (self.reason,)


def fit_configs(small: nn.Module, path: str, plan: Plan, active: ChannelConfig) -> None:
    """Give the Hugging Face networks in the extracted network `small` fitting configurations.

    `path`, `plan` and `active` are the place, the plan and the extracted channels of the converted
    network.
    """
    for name, network in list(_pretrained(small)):
        search = _Search(network, plan, active, _followers(plan, path, name))
        values = search.fitting()
        reason = search.nearest
        if values is not None:
            reason = _fault(small, name, path, search.config_of(values), plan)
        if values is not None and not reason:
            for slot, value in values.items():
                if value != slot.value:
                    slot.put(network.config, value)
        else:
            network.save_pretrained = Refusal(
                f"no {type(network.config).__name__} builds this network, so it cannot be saved "
                f"with save_pretrained: {reason}. Choose a width at which one does, or save it "
                "with torch.save, or the slimmable network with anywidth.save"
            )


def _followers(plan: Plan, path: str, name: str) -> list[tuple[str, str]]:
    """The attributes that follow the width in the module called `name`, by their path in it."""
    found = [(f"{path}.{slot.module}".strip("."), slot.attribute) for slot in plan.attributes]
    inside = f"{name}." if name else ""
    return [(p.removeprefix(inside), key) for p, key in found if p.startswith(inside)]


def _pretrained(small: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost networks of transformers, with their paths."""
    library = sys.modules.get("transformers.modeling_utils")
    inside: tuple[str, ...] = ()
    for path, module in small.named_modules() if library is not None else ():
        if isinstance(module, library.PreTrainedModel) and not path.startswith(inside):  # type: ignore[union-attr]
            yield path, module
            if not path:
                return
            inside += (f"{path}.",)


class _Search:
    """A search for sizes with which a network's class builds tensors of the network's shapes."""

    def __init__(
        self, network: Any, plan: Plan, active: ChannelConfig, followers: list[tuple[str, str]]
    ) -> None:
        self.network = network
        self.followers = followers
        self.wanted = self._described(network)
        self.nearest = ""
        self._fewest: float | None = None
        self._tried = 0
        narrow = [g for g in plan.groups.values() if plan.can_narrow(g.name)]
        self.ratios = {Fraction(active[g.name], g.channels): None for g in narrow}
        self.by_role: dict[str, dict[Fraction, int]] = {}
        for group in narrow:
            ratio = Fraction(active[group.name], group.channels)
            for role in group.roles:
                self.by_role.setdefault(role, {})[ratio] = active[group.name]

    def fitting(self) -> dict[Slot, int | None] | None:
        """Values of sizes that fit; None if there are none among those tried."""
        slots = list(_slots(self.network.config))
        values = {slot: self._likely(slot) for slot in slots}
        fewest = self._misfits(values)
        is_better = True
        while fewest and is_better:
            is_better = False
            for slot in slots:
                for value in self._candidates(slot):
                    if value == values[slot] or self._tried >= MOST_TRIED:
                        continue
                    count = self._misfits({**values, slot: value})
                    if count < fewest:
                        fewest, values[slot], is_better = count, value, True
        return values if fewest == 0 else None

    def config_of(self, values: dict[Slot, int | None]) -> Any:
        """A copy of the network's configuration with other sizes, as a file would give it back."""
        config = copy.deepcopy(self.network.config)
        for slot, value in values.items():
            slot.put(config, value)
        read = type(config).from_dict(json.loads(config.to_json_string()))
        read._attn_implementation = config._attn_implementation
        return read

    def _likely(self, slot: Slot) -> int | None:
        ratios = self.by_role.get(slot.role or "")
        if not ratios or slot.value is None:
            return slot.value
        size = slot.value * next(iter(ratios))
        return int(size) if size.denominator == 1 else slot.value

    def _candidates(self, slot: Slot) -> list[int | None]:
        if slot.value is None:
            return list(self.by_role.get("mlp", {}).values())
        sizes = [slot.value * ratio for ratio in (Fraction(1), *self.ratios)]
        return [int(size) for size in dict.fromkeys(sizes) if size.denominator == 1]

    def _misfits(self, values: dict[Slot, int | None]) -> float:
        """How many tensors and attributes of the network built with these values do not fit."""
        self._tried += 1
        try:
            twin = _build(type(self.network), self.config_of(values), "meta")
        except Exception as error:  # a class may refuse these sizes with any error
            wrong, nearest = float("inf"), str(error).strip().splitlines()[:1]
        else:
            built = self._described(twin)
            names = [n for n in {**self.wanted, **built} if self.wanted.get(n) != built.get(n)]
            wrong = len(names)
            nearest = [
                f"the nearest gives {name} {_shown(built.get(name))} instead of "
                f"{_shown(self.wanted.get(name))}"
                for name in names[:1]
            ]
        if self._fewest is None or wrong < self._fewest:
            self._fewest, self.nearest = wrong, "".join(nearest)
        return wrong

    def _described(self, network: nn.Module) -> dict[str, Any]:
        """The shapes of a network's tensors, and the attributes that follow the width."""
        found: dict[str, Any] = {n: tuple(tensor.shape) for n, tensor in named_tensors(network)}
        modules = dict(network.named_modules())
        for path, key in self.followers:
            found[f"{path}.{key}"] = held_number(modules.get(path), key)
        return found


def _slots(config: Any, owner: tuple[str, ...] = ()) -> Iterator[Slot]:
    for key, value in vars(config).items():
        if key.startswith("_") or "token" in key or "vocab" in key:
            continue
        if type(value).__name__ == type(config).__name__ or hasattr(value, "to_diff_dict"):
            yield from _slots(value, (*owner, key))
        elif type(value) is int and value > 1:
            yield Slot(owner, key, None, value)
        elif isinstance(value, list | tuple) and all(type(item) is int for item in value):
            yield from (Slot(owner, key, i, item) for i, item in enumerate(value))
        elif value is None and Slot(owner, key, None, None).role == "mlp":
            yield Slot(owner, key, None, None)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value}"


def _build(kind: Any, config: Any, device: str) -> Any:
    """A network of a class, with uninitialised parameters."""
    library: Any = sys.modules.get("transformers.initialization")
    unfilled = getattr(library, "no_init_weights", contextlib.nullcontext)
    with torch.random.fork_rng(devices=()), torch.device(device), unfilled():
        return kind(config)


def _fault(small: nn.Module, name: str, path: str, config: Any, plan: Plan) -> str:
    """Why a network built with the configuration does not fit; "" if it computes the same."""
    try:
        is_same = _computes_the_same(small, name, path, config, plan)
    except Exception as error:  # building or running it may raise any error
        return f"the nearest one builds a network that fails: {error}"
    return "" if is_same else "the network that the nearest one builds computes something else"


def _computes_the_same(small: nn.Module, name: str, path: str, config: Any, plan: Plan) -> bool:
    """Whether a network built with the configuration and these weights computes the same."""
    network = small.get_submodule(name)
    twin = _build(type(network), config, "cpu")
    held = network.state_dict()
    if not _makes_the_unsaved(network, config, held):
        return False
    twin.load_state_dict(held, assign=True)
    theirs = dict(twin.named_buffers())
    for key, tensor in network.named_buffers():
        theirs[key].data = theirs[key].data.to(tensor.device, tensor.dtype)
        if not _are_close(tensor, theirs[key]):
            return False
    try:
        inputs = example_inputs(small.get_submodule(path), plan)
    except AnywidthError:  # the plan keeps only the type of some arguments
        return True
    before = _run(small.get_submodule(path), inputs)
    if not name:
        return _are_equal(before, _run(twin.get_submodule(path), inputs))
    parent, _, key = name.rpartition(".")
    setattr(small.get_submodule(parent), key, twin)
    try:
        return _are_equal(before, _run(small.get_submodule(path), inputs))
    finally:
        setattr(small.get_submodule(parent), key, network)


def _makes_the_unsaved(network: Any, config: Any, held: dict[str, Tensor]) -> bool:
    """Whether a new network has the same tensors that `save_pretrained` leaves out.

    It makes those itself, such as tables of positions, and for its own width.
    """
    left_out = [n for n in getattr(network, "_keys_to_ignore_on_save", None) or () if n in held]
    if not left_out:
        return True
    with torch.random.fork_rng(devices=()):
        made = type(network)(config).state_dict()
    return all(_are_close(held[name].cpu(), made[name].to(held[name].dtype)) for name in left_out)


def _run(network: nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    with evaluating(network), torch.no_grad():
        return output_leaves(network(*inputs))


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(_are_close, first, second))


def _are_close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return bool(one is other or (type(one) is not Tensor and one == other))
    return torch.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True)
