"""Making a network slimmable, and setting the width it runs at."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD, is_converted
from anywidth.planning.groups import Plan
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.layers import narrow, widen_all
from anywidth.slimming.norm_statistics import (
    buffers_kept,
    keeps_statistics,
    new_statistics,
    norm_records,
)
from anywidth.slimming.record import Record, record_of
from anywidth.slimming.state import SlimmableState, state_of, tensor_owners
from anywidth.slimming.verification import verify
from anywidth.width import ChannelConfig, Width, WidthRange


def slimmable(
    model: nn.Module,
    plan: Plan | None = None,
    widths: WidthRange | None = None,
    *,
    example_input: Any = None,
    average_outputs: bool = False,
    verified: bool = True,
    strict: bool = False,
    allow_fixed: bool = False,
) -> nn.Module:
    """Makes every layer of a network able to run on the first of its channels; returns it.

    The network is converted in place. Its parameters stay the same objects under the same
    `state_dict` names; at full width it computes exactly what it did before.

    Args:
        model: the network.
        plan: what `anywidth.plan` found, perhaps edited; made here if not given.
        widths: the range to run in and the divisor to round to; the plan's own if not given,
            which is `WidthRange(0.25, 1.0, 8)` in a new one.
        example_input: as for `anywidth.plan`; needed without a plan, or where that was made with
            arguments other than tensors, numbers and text.
        average_outputs: scale each layer's output by full over active inputs (the paper's output
            averaging, appendix). A weight that is computed, or used outside its layer too, is not
            scaled.
        verified: after converting, run some widths and compare the sliced network with the
            extracted one. A group that fails is pinned at full size, with a note in the plan.
        allow_fixed: convert a network of which nothing can narrow, too.
        strict: raise instead of pinning.

    If anything fails the network is left as it was.

    Example:
        >>> plan = anywidth.plan(model, torch.randn(2, 3, 224, 224))
        >>> anywidth.slimmable(model, plan, anywidth.WidthRange(0.25, 1.0, divisor=8))
    """
    if not isinstance(model, nn.Module):
        raise AnywidthError(f"slimmable(model={type(model).__name__}): expected a torch.nn.Module")
    if is_converted(model):
        raise AnywidthError(
            f"{type(model).__name__} (or a part of it) has been converted already; "
            "set its width with anywidth.set_width(model, width)"
        )
    if plan is None:
        if example_input is None:
            raise AnywidthError(
                "slimmable() was given neither a plan nor an example input: pass "
                "example_input=torch.randn(2, 3, 224, 224), or plan=anywidth.plan(model, x)"
            )
        plan = make_plan(model, example_input)
    if not isinstance(plan, Plan):
        raise AnywidthError(f"plan={type(plan).__name__}: expected what anywidth.plan() returns")
    if widths is None:
        widths = plan.widths
    if not isinstance(widths, WidthRange):
        raise AnywidthError(f"widths={widths!r}: expected anywidth.WidthRange(low, high, divisor)")
    _check_fits(model, plan)
    plan = plan.copy()
    plan.widths = widths
    try:
        _apply(model, plan, average_outputs)
        if verified:
            with buffers_kept(model):
                verify(model, strict=strict, example_input=example_input)
        _check_elastic(type(model).__name__, plan, allow_fixed)
        _track_ends(model)
        plan._is_applied, plan.given = True, None
    except BaseException:
        _undo(model)
        raise
    return model


def set_width(model: nn.Module, width: Width) -> None:
    """Runs a converted network at `width` from now on: a fraction or a `ChannelConfig`."""
    state_of(model).set(model, width)


@contextlib.contextmanager
def at_width(model: nn.Module, width: Width) -> Iterator[ChannelConfig]:
    """Runs a converted network at `width` inside a `with` block, and as before after it.

    Call `backward` inside too where activations are recomputed (`torch.utils.checkpoint`). A
    network has one width at a time, whatever thread sets it: give each thread one of its own
    (`copy.deepcopy`, or `anywidth.extract` for each width).
    """
    state = state_of(model)
    before = state.width
    state.set(model, width)
    try:
        yield state.config
    finally:
        state.set(model, before)


def plan_of(model: nn.Module) -> Plan:
    """The plan a network was converted with, with what verification changed in it.

    To edit it, take a copy and convert another network with that.
    """
    return state_of(model).plan


def _apply(model: nn.Module, plan: Plan, average_outputs: bool) -> None:
    # What reaches a norm changes with the width even where its channels do not.
    narrowed: dict[nn.Module, list[str]] = {m: [] for m in model.modules() if keeps_statistics(m)}
    for name, owner, key in tensor_owners(model, plan):
        is_elastic = any(axis is not None for axis in plan.tensors[name])
        is_scaled = name in plan.scales or (average_outputs and name in plan.inputs)
        if is_elastic or is_scaled:
            narrowed.setdefault(owner, []).append(key)
    for module, tensors in narrowed.items():
        narrow(module, tensors)
    state = SlimmableState(plan, average_outputs)
    model.__dict__.setdefault(RECORD, Record(type(model))).network = state
    state.set_full(model)


def _undo(model: nn.Module) -> None:
    record = record_of(model)
    if record is not None and record.network is not None:
        with contextlib.suppress(Exception):  # it may be what failed
            record.network.set(model, record.network.plan.full)
    widen_all(model)


def _track_ends(model: nn.Module) -> None:
    """Statistics of the narrowest and widest are kept up during training, for validation."""
    plan = plan_of(model)
    for width in (plan.widths.low, plan.widths.high):
        track_statistics(model, width)


def track_statistics(model: nn.Module, width: Width) -> None:
    """Keeps running batch-norm statistics at `width` whenever the network trains at it."""
    state = state_of(model)
    config = state.resolve(width)
    if config == state.plan.full:
        return
    label = None if isinstance(width, ChannelConfig) else float(width)
    with at_width(model, width):
        for norm, record in norm_records(model).items():
            record.bank.setdefault(config, new_statistics(norm, label))


def _check_elastic(name: str, plan: Plan, allow_fixed: bool) -> None:
    """Says so if little of a network narrows, and why."""
    share = plan.elastic_share()
    if allow_fixed or share >= 0.5 or plan.widths.low == plan.widths.high:
        return
    layers = Counter[str]()
    for group in plan.groups.values():
        if group.fixed is not None:
            layers[group.fixed] += len(group.makers)
    why = "; ".join(f"{count} layers: {reason}" for reason, count in layers.most_common(3))
    if not plan.elastic():
        raise AnywidthError(
            f"nothing of {name} can narrow ({why}). print(anywidth.plan(model, example_input)) "
            "lists all; pass allow_fixed=True to convert it all the same"
        )
    if plan.costs:
        warnings.warn(
            f"{share:.0%} of the multiply-adds of {name} narrow with the width ({why}). "
            "print(anywidth.plan_of(model)) lists all",
            stacklevel=3,
        )


def _check_fits(model: nn.Module, plan: Plan) -> None:
    held: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, shape in plan.shapes.items():
        if name not in held:
            raise AnywidthError(
                f"this plan is for another network: it names {name!r}, which "
                f"{type(model).__name__} lacks; make one with anywidth.plan(model, example_input)"
            )
        if tuple(held[name].shape) != shape:
            raise AnywidthError(
                f"this plan is for another network: {name!r} has shape "
                f"{tuple(held[name].shape)}, the plan says {shape}"
            )
    known = {id(held[name]) for name in plan.shapes}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise AnywidthError(
                f"this plan is for another network: it lacks {name!r} of {type(model).__name__}; "
                "make one with anywidth.plan(model, example_input)"
            )
