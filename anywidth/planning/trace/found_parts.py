"""Parts of a network that can be exported, if the whole cannot."""

from __future__ import annotations

from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import is_images, number_of_examples
from anywidth.planning.part_calls import RecordedCalls, is_in, recorded_run, shared_tensors
from anywidth.planning.trace.exported_graphs import Exports


def export_parts(model: nn.Module, calls: RecordedCalls, inputs: tuple[Any, ...]) -> Exports:
    """The graphs of the calls of parts; an error names the part that has none.

    `inputs` are the arguments of the whole network.
    """
    first = inputs[0] if inputs else None
    # For a detector, the batch size is how many images it is given in a list.
    examples = len(first) if is_images(first) else number_of_examples(inputs)
    exports = Exports(calls.of(model), calls.tensors, examples)
    try:
        _ = exports.traced
    except AnywidthError:
        for part in dict.fromkeys(call.part for call in calls.calls):
            error = _why_not(model, calls.alone(part))
            if error is not None:
                raise AnywidthError(
                    f"part {part!r} cannot be planned: {error}. Name smaller parts of it, or pass "
                    "parts='auto'"
                ) from error.__cause__
        raise
    return exports


def _why_not(model: nn.Module, calls: RecordedCalls) -> AnywidthError | None:
    """Why a part can be exported in neither mode; None if it can be."""
    exports = Exports(calls.of(model), calls.tensors)
    try:
        if exports.get(False) is None:
            _ = exports.traced
    except AnywidthError as error:
        return error
    return None


def find_parts(model: nn.Module, inputs: tuple[Any, ...]) -> list[str]:
    """The largest modules that can be exported, in the order of the network.

    Of modules without parameters, those that lie between others.
    """
    found: set[str] = set()
    left = _children(model, "")
    while left:
        run = recorded_run(model, inputs, left)
        strays, calls = run.strays(), run.recorded()
        called = {call.part for call in calls.calls}
        smaller: list[str] = []
        for part in left:
            is_apart = part not in run.odd and not any(is_in(name, [part]) for name in strays)
            if part in called and is_apart and _why_not(model, calls.alone(part)) is None:
                found.add(part)
            elif part in called or part not in run.entered:
                smaller += _children(model, part)
        left = smaller
    for inside, _ in shared_tensors(model, sorted(found)):
        found -= {part for part in found if is_in(inside, [part])}
    return _without_ends(model, inputs, [n for n, _ in model.named_modules() if n in found])


def _without_ends(model: nn.Module, inputs: tuple[Any, ...], parts: list[str]) -> list[str]:
    """The parts with parameters, and those through which channels go from part to part."""
    while True:
        calls = recorded_run(model, inputs, parts).recorded()
        held = {p for p in parts if any(True for _ in model.get_submodule(p).parameters())}
        kept = [p for p in parts if p in held or calls.lies_between(p)]
        if kept == parts:
            return parts
        parts = kept


def _children(model: nn.Module, path: str) -> list[str]:
    inside = model.get_submodule(path).named_children()
    return [f"{path}.{name}".lstrip(".") for name, _ in inside]
