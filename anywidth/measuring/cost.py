"""The cost of a width: multiply-adds, parameters, measured latency."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs, is_images
from anywidth.planning.groups import Plan
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import buffers_kept, uncalibrated_allowed
from anywidth.slimming.state import state_of
from anywidth.width import ChannelConfig, Width, check_whole


def macs(model: nn.Module | Plan, width: Width) -> int:
    """Multiply-adds of one example at `width`, for the input shape the plan was made with.

    Convolutions, linear layers, matrix products and attention are counted, as the paper does;
    norms and activations are not. Nothing is run.
    """
    plan, config = _plan_and_config(model, width)
    return plan.macs(config)


def parameter_count(model: nn.Module | Plan, width: Width) -> int:
    """Number of parameters of the network at `width`, without buffers."""
    plan, config = _plan_and_config(model, width)
    total = 0
    for name in plan.parameters:
        axes, shape = plan.tensors[name], plan.shapes[name]
        total += math.prod(
            size if axis is None else plan.axis_size(axis, config)
            for axis, size in zip(axes, shape, strict=True)
        )
    return total


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one forward pass, over `repeats` passes.

    Args:
        median: half of the passes were faster; the number to report.
        fastest: the shortest pass.
        repeats: how many passes were timed.
    """

    median: float
    fastest: float
    repeats: int


def latency(
    model: nn.Module,
    width: Width,
    *,
    batch_size: int = 1,
    extracted: bool = False,
    fold: bool = False,
    repeats: int = 20,
    warmup: int = 5,
    input_shape: tuple[int, ...] | None = None,
) -> Latency:
    """Time forward passes at `width` on the network's device, in milliseconds.

    Returns a `Latency`: the median and the fastest pass, both in milliseconds of one whole pass
    (of `batch_size` examples). Widths without batch-norm statistics can be timed too.

    Args:
        model: a converted network.
        width: a fraction of the full width, or a `ChannelConfig`.
        batch_size: examples in one pass.
        extracted: time the extracted network instead of the sliced one.
        fold: time the extracted network with its batch norms folded.
        repeats: how many passes are timed.
        warmup: untimed passes before them.
        input_shape: shape of one example; the plan's example if not given.

    Example:
        >>> anywidth.latency(model, 0.5).median  # milliseconds
    """
    check_whole(repeats, 1, "latency(): repeats")
    check_whole(batch_size, 1, "latency(): batch_size")
    check_whole(warmup, 0, "latency(): warmup")
    if input_shape is not None and not isinstance(input_shape, Sequence):
        raise AnywidthError(
            f"latency(input_shape={input_shape!r}): expected the shape of one example, "
            "such as (3, 224, 224)"
        )
    state = state_of(model)
    inputs = example_batch(model, batch_size, input_shape)
    config = state.resolve(width)
    timed = extract_quietly(model, config, fold=fold) if extracted or fold else model
    with (
        evaluating(timed),
        buffers_kept(model),
        at_width(model, config),
        uncalibrated_allowed(model),
        torch.no_grad(),
    ):
        for _ in range(warmup):
            timed(*inputs)
        times = [time_pass(timed, inputs) for _ in range(repeats)]
    return Latency(statistics.median(times), min(times), repeats)


def example_batch(
    model: nn.Module, size: int = 1, shape: tuple[int, ...] | None = None
) -> list[Any]:
    """A random input of so many examples; `shape` is that of one, by default the plan's."""
    examples = example_inputs(model, state_of(model).plan)
    tensors = [x for x in examples if isinstance(x, Tensor)]
    # Beside images, whole numbers are something else, such as labels. Alone they are the input.
    is_of_numbers = not any(x.is_floating_point() for x in tensors)

    def many(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            is_shaped = is_of_numbers or argument.is_floating_point()
            return _batch_like(argument, size, shape if is_shaped else None)
        if is_images(argument):  # as detectors take a batch
            return [argument[number % len(argument)] for number in range(size)]
        if isinstance(argument, list | tuple):
            return [_batch_like(x, size, None) if isinstance(x, Tensor) else x for x in argument]
        return argument

    return [many(argument) for argument in examples]


def _batch_like(example: Tensor, size: int, shape: tuple[int, ...] | None) -> Tensor:
    if example.dim() == 0:
        return example
    if not example.is_floating_point():
        if shape is not None:
            return example.flatten()[:1].expand(size, *shape)
        return example[:1].expand(size, *example.shape[1:])
    shape = (size, *(shape or example.shape[1:]))
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    return example.new_empty(shape).copy_(torch.randn(shape, generator=generator))


def time_pass(model: nn.Module, inputs: list[Any]) -> float:
    """Milliseconds of one forward pass."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def _plan_and_config(model: nn.Module | Plan, width: Width) -> tuple[Plan, ChannelConfig]:
    if isinstance(model, Plan):
        return model, model.resolve(width)
    state = state_of(model)
    return state.plan, state.resolve(width)
