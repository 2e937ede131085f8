"""Parts of a network: their calls in one run of the whole, to be planned and verified with."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from anywidth.errors import AnywidthError
from anywidth.planning.held_buffers import buffers_restored
from anywidth.planning.model_outputs import output_leaves
from anywidth.planning.modes import evaluating

# What an output may consist of; in anything else there may be tensors that nobody sees.
_SEEN = (Tensor, int, float, str)


class Given(NamedTuple):
    """A tensor that a part is given: its place among the recorded ones.

    If another part gives it, `made` is (call, output): which output of which call.
    """

    place: int
    made: tuple[int, int] | None = None


@dataclass(frozen=True)
class Call:
    """One call of a part.

    Args:
        part: its name in the network.
        arguments: the leaves of its arguments; a `Given` stands for each tensor.
        form: how the leaves are put together again: (positional arguments, arguments by name).
        inner: the outputs that nothing but other parts reads.
    """

    part: str
    arguments: tuple[Any, ...]
    form: TreeSpec
    inner: frozenset[int] = frozenset()

    def alone(self) -> Call:
        """The call as if no other part made what it is given."""
        given = (Given(x.place) if isinstance(x, Given) else x for x in self.arguments)
        return Call(self.part, tuple(given), self.form)

    def read(self) -> set[tuple[int, int]]:
        """What other parts give it: (call, output)."""
        return {x.made for x in self.arguments if isinstance(x, Given) and x.made is not None}


class PartCalls(nn.Module):
    """Stands for a network whose forward is the calls of its parts in one run, and nothing else.

    It holds the network's own modules under their own names. Its arguments are the recorded
    tensors, its outputs those that the rest of the network reads.
    """

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = tuple(calls)
        self.training = model.training
        for kept in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kept] = model.__dict__[kept]

    def forward(self, *given: Tensor) -> list[Tensor]:
        made: list[list[Any]] = []
        for call in self.calls:
            leaves = [_argument(one, given, made) for one in call.arguments]
            arguments, named = tree_unflatten(leaves, call.form)
            output = self.get_submodule(call.part)(*arguments, **named)
            made.append(output_leaves(output, hidden=True))
        return [
            output
            for call, outputs in zip(self.calls, made, strict=True)
            for place, output in enumerate(outputs)
            if isinstance(output, Tensor) and place not in call.inner
        ]


def _argument(one: Any, given: Sequence[Tensor], made: Sequence[Sequence[Any]]) -> Any:
    if not isinstance(one, Given):
        return one
    return given[one.place] if one.made is None else made[one.made[0]][one.made[1]]


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of the parts in one run of a network.

    Args:
        calls: in order.
        tensors: what the parts are given, copied.
        outside: multiply-adds of the rest of the network.
        idle: modules outside the parts with parameters that the run did not use.
    """

    calls: tuple[Call, ...]
    tensors: tuple[Tensor, ...]
    outside: int = 0
    idle: tuple[str, ...] = ()

    def of(self, model: nn.Module) -> PartCalls:
        """The calls in the network that made them, or in a copy of it."""
        return PartCalls(model, self.calls)

    def copied(self) -> tuple[Tensor, ...]:
        """The tensors, copied once more: a part may change in place what it is given."""
        return tuple(tensor.clone() for tensor in self.tensors)

    def joins(self, part: str) -> bool:
        """Whether a part gives another its output, or is given one, that nothing else reads."""
        return self._is_given(part) or self._gives(part)

    def lies_between(self, part: str) -> bool:
        return self._is_given(part) and self._gives(part)

    def _gives(self, part: str) -> bool:
        return any(call.inner for call in self.calls if call.part == part)

    def _is_given(self, part: str) -> bool:
        return any(call.read() for call in self.calls if call.part == part)

    def alone(self, part: str) -> RecordedCalls:
        """The calls of one part, as if there were no others."""
        calls = tuple(call.alone() for call in self.calls if call.part == part)
        return RecordedCalls(calls, self.tensors)


def record_calls(model: nn.Module, inputs: tuple[Any, ...], parts: Sequence[str]) -> RecordedCalls:
    """Runs the network once in evaluation mode and keeps what its parts are given.

    If a part is given the output of another, and nothing else reads that, both are planned as one:
    these channels may narrow. All other inputs and outputs of the parts stay whole.
    """
    recorder = recorded_run(model, inputs, parts)
    for part in parts:
        if part not in recorder.entered:
            raise AnywidthError(
                f"part {part!r} is not called when {type(model).__name__} runs with the example: "
                "give an example with which it is, or name the modules inside it that are"
            )
    for part, kind in recorder.odd.items():
        raise AnywidthError(
            f"part {part!r} returns a {kind}, in which no tensors are seen: name the modules "
            "inside it, or let it return tensors in lists, dicts or dataclasses"
        )
    for name in recorder.strays():
        raise AnywidthError(
            f"{name!r} is used inside and outside the parts {list(parts)}, and would be narrower "
            "only inside: leave out the part that uses it, or name one that holds all its uses"
        )
    return recorder.recorded()


def recorded_run(model: nn.Module, inputs: tuple[Any, ...], parts: Sequence[str]) -> Recorder:
    recorder = Recorder(model, parts)
    modes = recorder.counter, recorder, _Reads(recorder)
    kept = evaluating(model), buffers_restored(model), torch.no_grad()
    with contextlib.ExitStack() as stack:
        for one in (*kept, recorder.hooked(), *modes):
            stack.enter_context(one)
        try:
            recorder.output = model(*inputs)
        except Exception as error:
            said = (str(error).strip().splitlines() or ["no message"])[0]
            raise AnywidthError(
                f"{type(model).__name__} does not run with the example input in evaluation mode, "
                f"as planning parts of it needs: {type(error).__name__}: {said}"
            ) from error
    return recorder


class Recorder(TorchDispatchMode):
    """Keeps the calls of parts, and sees what every operation outside of them reads."""

    def __init__(self, model: nn.Module, parts: Sequence[str]) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # which loads triton

        super().__init__()
        self.parts = {part: model.get_submodule(part) for part in parts}
        self.counter = FlopCounterMode(display=False)
        self.entered: set[str] = set()
        self.odd: dict[str, str] = {}  # types of outputs whose tensors cannot be seen
        self.output: Any = None
        self._names = {id(tensor): name for name, tensor in named_tensors(model)}
        self._parameters = {name for name, _ in model.named_parameters()}
        self._used: dict[bool, set[str]] = {False: set(), True: set()}
        self._depth = 0
        self._calls: list[Call] = []
        self._tensors: list[Tensor] = []
        # Outputs by their identity. They are kept, so that no other tensor gets it.
        self._made: dict[int, tuple[int, int]] = {}
        self._outputs: list[Tensor] = []
        self._read_outside: set[int] = set()
        self._given: set[int] = set()  # arguments of the part that runs
        self._counted = 0
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks of the parts, which tell of their calls inside a `with` block."""
        with contextlib.ExitStack() as stack:
            for part, module in self.parts.items():
                enter, leave = partial(self._enter, part), partial(self._leave, part)
                # Before other hooks, which will run again when the call does.
                before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                stack.enter_context(before)
                stack.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, part: str, module: Any, given: tuple[Any, ...], named: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # a run that is not ours
        self._depth += 1
        self.entered.add(part)
        if self._depth > 1:
            return  # the part around it is recorded
        self._counted -= self.counter.get_total_flops()
        leaves, form = tree_flatten((given, named))
        self._given = {id(leaf) for leaf in leaves}
        arguments = tuple(self._kept(x) if isinstance(x, Tensor) else x for x in leaves)
        self._calls.append(Call(part, arguments, form))

    def _kept(self, tensor: Tensor) -> Given:
        self._tensors.append(tensor.clone())
        return Given(len(self._tensors) - 1, self._made.get(id(tensor)))

    def _leave(self, part: str, module: Any, given: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth:
            return
        self._counted += self.counter.get_total_flops()
        for place, leaf in enumerate(output_leaves(output, hidden=True)):
            if not isinstance(leaf, _SEEN):
                self.odd.setdefault(part, type(leaf).__name__)
            elif isinstance(leaf, Tensor):
                self._outputs.append(leaf)
                # What a part passes on was made before.
                self._made.setdefault(id(leaf), (len(self._calls) - 1, place))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.note_read((args, kwargs))
        return func(*args, **(kwargs or {}))

    def note_read(self, arguments: Any) -> None:
        read = [id(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._used[self._depth > 0].update(self._names[i] for i in read if i in self._names)
        # What a part reads that it was not given came to it by other ways.
        given = self._given if self._depth else ()
        self._read_outside.update(i for i in read if i in self._made and i not in given)

    def strays(self) -> list[str]:
        """Parameters and buffers that are used inside the parts, or are theirs, and outside."""
        own = {name for name in self._names.values() if is_in(name, tuple(self.parts))}
        return sorted(self._used[False] & (self._used[True] | own))

    def recorded(self) -> RecordedCalls:
        """The calls; those tensors are inner that go from part to part alone."""
        leaves = output_leaves(self.output, hidden=True)
        is_seen = all(isinstance(leaf, _SEEN) for leaf in leaves)
        returned = {id(leaf) for leaf in leaves} if is_seen else set(self._made)
        outer = {self._made[i] for i in self._made if i in self._read_outside | returned}
        inner = set[tuple[int, int]]().union(*(call.read() for call in self._calls)) - outer
        calls = []
        for number, call in enumerate(self._calls):
            arguments = [
                Given(x.place) if isinstance(x, Given) and x.made in outer else x
                for x in call.arguments
            ]
            own = frozenset(output for where, output in inner if where == number)
            calls.append(Call(call.part, tuple(arguments), call.form, own))
        outside = (self.counter.get_total_flops() - self._counted) // 2
        used = self._used[True] | self._used[False]
        unused = [n for n in self._parameters - used if not is_in(n, tuple(self.parts))]
        idle = tuple(sorted({name.rpartition(".")[0] for name in unused}))
        return RecordedCalls(tuple(calls), tuple(self._tensors), outside, idle)


class _Reads(TorchFunctionMode):
    """Tells a recorder of values that leave torch, which is no operation."""

    LEAVING = (
        Tensor.numpy,
        Tensor.__array__,
        Tensor.tolist,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.__dlpack__,
    )

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.LEAVING:
            self._recorder.note_read(args)
        return func(*args, **(kwargs or {}))


# ---- names ------------------------------------------------------------------------------------


def check_parts(model: nn.Module, parts: Any) -> list[str]:
    """The names of parts, if they are modules of the network that have nothing in common."""
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise AnywidthError(
            f"parts={parts!r}: expected a list of module names, such as ['backbone'], or 'auto'"
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} - {""}
    for part in parts:
        if part not in known:
            near = difflib.get_close_matches(str(part), known, 3) or sorted(known)[:5]
            raise AnywidthError(
                f"part {part!r}: {type(model).__name__} has no such module; near names are {near}"
            )
    for part, other in itertools.permutations(parts, 2):
        if f"{part}.".startswith(f"{other}."):
            raise AnywidthError(f"part {part!r} is inside part {other!r}: name one of them")
    for inside, outside in shared_tensors(model, parts):
        raise AnywidthError(
            f"{inside!r} and {outside!r} are one tensor, and only the first is in a part: name a "
            "module that holds both, or leave out the part"
        )
    return list(parts)


def shared_tensors(model: nn.Module, parts: Sequence[str]) -> list[tuple[str, str]]:
    """Tensors with a name in the parts and one outside."""
    inside = {id(tensor): name for name, tensor in named_tensors(model) if is_in(name, parts)}
    return [
        (inside[id(tensor)], name)
        for name, tensor in named_tensors(model)
        if id(tensor) in inside and not is_in(name, parts)
    ]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def is_in(name: str, parts: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of the parts."""
    return any(name.startswith(f"{part}.") for part in parts)
