"""The library's central property: at every configuration, sliced equals extracted."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import uncalibrated_allowed

TOLERANCE = 1e-5


def convert(model: nn.Module, example: Any, widths: aw.WidthRange | None = None, **options: Any):
    """A strict conversion: nothing may be pinned on the way."""
    return aw.slimmable(
        model,
        aw.plan(model, example),
        widths or aw.WidthRange(0.25, 1.0, divisor=2),
        strict=True,
        **options,
    )


def configurations(model: nn.Module, count: int = 2, seed: int = 0) -> list[aw.ChannelConfig]:
    """The narrowest, one uniform and `count` nonuniform configurations."""
    plan = aw.plan_of(model)
    chance = random.Random(seed)
    low, high = plan.widths.low, plan.widths.high
    free = [group.name for group in plan.elastic()]
    drawn = [plan.resolve({n: chance.uniform(low, high) for n in free}) for _ in range(count)]
    return list(dict.fromkeys([plan.narrowest, plan.resolve((low + high) / 2), *drawn]))


def stir(model: nn.Module, inputs: Any, batches: int = 3) -> None:
    """Gives norms weights and statistics that are not those of a new network."""
    for module in model.modules():
        for name in ("weight", "bias"):
            held = module._parameters.get(name)
            if held is not None and held.dim() == 1:
                torch.nn.init.uniform_(held, 0.5, 1.5)
    mode = model.training
    model.train()
    with torch.no_grad():
        for _ in range(batches):
            model(*[x + torch.randn_like(x) if x.is_floating_point() else x for x in inputs])
    model.train(mode)


def assert_close(one: Any, other: Any, tolerance: float = TOLERANCE) -> None:
    ones, others = tree_leaves(one), tree_leaves(other)
    assert len(ones) == len(others)
    for first, second in zip(ones, others, strict=True):
        if isinstance(first, Tensor):
            scale = max(1.0, float(first.detach().abs().max()))
            torch.testing.assert_close(first / scale, second / scale, rtol=0, atol=tolerance)


def assert_agrees(model: nn.Module, *inputs: Any, tolerance: float = TOLERANCE) -> None:
    """Sliced and extracted give the same in evaluation mode, at several configurations."""
    model.eval()
    with torch.no_grad(), uncalibrated_allowed(model):
        for config in configurations(model):
            small = extract_quietly(model, config)
            with aw.at_width(model, config):
                assert_close(model(*inputs), small(*inputs), tolerance)
            count = sum(p.numel() for p in small.parameters())
            assert count == aw.parameter_count(model, config)


def active_entries(plan: aw.Plan, name: str, config: aw.ChannelConfig) -> Tensor:
    """Which entries of a parameter a configuration uses."""
    shape = plan.shapes[name]
    active = torch.ones(shape, dtype=torch.bool)
    for dim, axis in enumerate(plan.tensors[name]):
        if axis is not None:
            kept = torch.zeros(shape[dim], dtype=torch.bool)
            for start, length in plan.axis_ranges(axis, config):
                kept[start : start + length] = True
            active &= kept.view([-1 if i == dim else 1 for i in range(len(shape))])
    return active


def assert_is_whole_with_zeros(model: nn.Module, original: nn.Module, *inputs: Any) -> None:
    """A narrow network gives what the whole one does with all other weights set to zero.

    Extracted networks are cut as sliced ones are; this tells whether they are cut in the right
    places. It holds where zeros stay zeros up to the next layer.
    """
    plan = aw.plan_of(model)
    model.eval()
    for config in configurations(model):
        whole = copy.deepcopy(original).eval()
        with torch.no_grad(), aw.at_width(model, config):
            for name, parameter in whole.named_parameters():
                parameter.mul_(active_entries(plan, name, config))
            assert_close(model(*inputs), whole(*inputs))


def assert_gradients(model: nn.Module, config: aw.ChannelConfig, *inputs: Any) -> None:
    """After a backward at `config`, the active slice has the extracted network's gradient.

    All other entries are exactly zero.
    """
    plan = aw.plan_of(model)
    small = extract_quietly(model, config).train()
    model.train()
    model.zero_grad()
    with aw.at_width(model, config):
        _loss(model(*inputs)).backward()
    _loss(small(*inputs)).backward()
    twins = dict(small.named_parameters())
    for name, parameter in model.named_parameters():
        twin = twins[name].grad
        if parameter.grad is None or twin is None:
            assert twin is None or not twin.any(), name
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        active = active_entries(plan, name, config)
        assert int(active.sum()) == twin.numel(), name
        assert not parameter.grad[~active].any(), f"{name} has gradient outside its slice"
        assert_close(parameter.grad[active], twin.flatten(), 1e-4)


def _loss(output: Any) -> Tensor:
    """A sum whose gradient differs from entry to entry."""
    total = torch.zeros(())
    for leaf in tree_leaves(output):
        weights = torch.linspace(-1, 1, leaf.numel()).view(leaf.shape)
        total = total + (leaf * weights).sum()
    return total
