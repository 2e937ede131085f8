"""Make a network slimmable, and set its width."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.cuts import RECORD, is_converted
from anywidth.planning.groups import Plan
from anywidth.planning.plain_tensors import register_tables, release_tables
from anywidth.planning.plan_checks import check_fits
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.layers import narrow, widen_all
from anywidth.slimming.norm_statistics import (
    buffers_kept,
    is_initial,
    keeps_statistics,
    new_statistics,
    norm_records,
)
from anywidth.slimming.pass_hooks import hook_passes
from anywidth.slimming.record import Record, network_state
from anywidth.slimming.state import SlimmableState, state_of, tensor_owners
from anywidth.slimming.verifying.verification import verify
from anywidth.width import ChannelConfig, Width, WidthRange

# The largest share of a network's multiply-adds that layers which stay whole may cost at the
# narrowest width without a warning.
MOST_HELD_BACK = 0.3


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
    """Make every layer of a network able to run on the first of its channels; returns the network.

    The network is converted in place. Its parameters stay the same objects under the same
    `state_dict` names; at full width its output does not change.

    Args:
        model: the network.
        plan: from `anywidth.plan`, possibly edited; made here if not given.
        widths: the range of widths and the divisor for rounding; the plan's own if not given,
            which is `WidthRange(0.25, 1.0, 8)` for a new plan.
        example_input: as in `anywidth.plan`; needed without a plan, or if the plan was made with
            arguments other than tensors, numbers and text.
        average_outputs: scale each layer's output by full over active inputs (the paper's output
            averaging, appendix). Weights that are computed or also used outside their layer are
            not scaled.
        verified: after converting, run some widths and compare the sliced network with the
            extracted one. A group that fails is pinned at full size, with a note in the plan.
        allow_fixed: also convert a network in which nothing can narrow.
        strict: raise an error instead of pinning.

    If anything fails, the network is unchanged.

    Example:
        >>> plan = anywidth.plan(model, torch.randn(2, 3, 224, 224))
        >>> anywidth.slimmable(model, plan, anywidth.WidthRange(0.25, 1.0, divisor=8))
    """
    if not isinstance(model, nn.Module):
        raise AnywidthError(f"slimmable(model={type(model).__name__}): expected a torch.nn.Module")
    if is_converted(model):
        raise AnywidthError(
            f"{type(model).__name__} (or a part of it) is already converted; "
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
        raise AnywidthError(f"plan={type(plan).__name__}: expected a result of anywidth.plan()")
    if widths is None:
        widths = plan.widths
    if not isinstance(widths, WidthRange):
        raise AnywidthError(f"widths={widths!r}: expected anywidth.WidthRange(low, high, divisor)")
    tables = register_tables(model, plan.tensors)
    try:
        check_fits(model, plan)
        plan = plan.copy()
        plan.widths = widths
        _apply(model, plan, average_outputs, tables)
        if verified:
            with buffers_kept(model):
                verify(model, strict=strict, example_input=example_input)
        _check_elastic(type(model).__name__, plan, allow_fixed)
        for width in (widths.low, widths.high):  # for validation
            track_statistics(model, width)
        plan._is_applied, plan.given = True, None
        if all(is_initial(norm) for norm in norm_records(model)):
            weights = state_of(model).weights
            weights.initial = weights.fingerprint()
    except BaseException:
        state = network_state(model)
        if state is not None:
            with contextlib.suppress(Exception):  # it may be the cause
                state.set(model, state.plan.full)
        widen_all(model)
        release_tables(model, tables)
        raise
    return model


def set_width(model: nn.Module, width: Width) -> None:
    """Set the width of a converted network: a fraction or a `ChannelConfig`.

    The network may be a part of `model`, such as the backbone of a detector.
    """
    network = network_in(model)
    state_of(network).set(network, width, is_lasting=True)


@contextlib.contextmanager
def at_width(model: nn.Module, width: Width) -> Iterator[ChannelConfig]:
    """Run a converted network at `width` inside a `with` block; afterwards it has its old width.

    Until then the network belongs to this thread, and other threads get an error: give each thread
    its own network, `anywidth.replica(model)`.
    """
    network = network_in(model)
    state = state_of(network)
    with state.at(network, width):
        yield state.config


def plan_of(model: nn.Module) -> Plan:
    """The plan of a converted network, with the changes that verification made.

    To edit it, make a copy and convert another network with the copy.
    """
    return state_of(network_in(model)).plan


def _apply(model: nn.Module, plan: Plan, average_outputs: bool, tables: list[str]) -> None:
    # The input of a norm changes with the width even if its channels do not.
    narrowed: dict[nn.Module, list[str]] = {m: [] for m in model.modules() if keeps_statistics(m)}
    for name, owner, key in tensor_owners(model, plan):
        is_elastic = any(axis is not None for axis in plan.tensors[name])
        is_scaled = name in plan.scales or (average_outputs and name in plan.inputs)
        if is_elastic or is_scaled:
            narrowed.setdefault(owner, []).append(key)
    for module, tensors in narrowed.items():
        narrow(module, tensors)
    state = SlimmableState(plan, average_outputs)
    state.tables = tables
    model.__dict__.setdefault(RECORD, Record(type(model))).network = state
    hook_passes(model)
    state.set_full(model)


def track_statistics(model: nn.Module, width: Width) -> None:
    """Track running batch-norm statistics at `width` whenever the network trains at it."""
    state = state_of(network_in(model))
    config = state.resolve(width)
    if config == state.plan.full:
        return
    label = None if isinstance(width, ChannelConfig) else float(width)
    with at_width(model, width):
        for norm, record in norm_records(model).items():
            record.bank.setdefault(config, new_statistics(norm, label)).is_tracked = True


def _check_elastic(name: str, plan: Plan, allow_fixed: bool) -> None:
    """Warn if little of a network narrows, with the reasons."""
    share, low, held = plan.elastic_share(), plan.widths.low, plan.held_back()
    much = sum(one.share for one in held) > MOST_HELD_BACK
    if allow_fixed or low == plan.widths.high or (share >= 0.5 and not much):
        return
    layers = Counter[str]()
    for group in plan.groups.values():
        if group.fixed is not None:
            layers[group.fixed] += len(group.makers)
    why = "; ".join(f"{count} layers: {reason}" for reason, count in layers.most_common(3))
    if not plan.elastic():
        why = why or "; ".join(plan.notes) or "no layer makes channels that another one reads"
        raise AnywidthError(
            f"nothing in {name} can narrow ({why}). print(anywidth.plan(model, example_input)) "
            "lists all layers; pass allow_fixed=True to convert it anyway"
        )
    if plan.costs:
        left = plan.macs(plan.narrowest) / plan.macs(plan.full)
        if held:
            why = "what stays whole costs " + "; ".join(str(one) for one in held[:3])
        warnings.warn(
            f"{left:.0%} of the multiply-adds of {name} are left at width {low:g}; {share:.0%} "
            f"shrink with the width ({why}). "
            "print(anywidth.plan_of(model)) lists all layers",
            stacklevel=3,
        )
