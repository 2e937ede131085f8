"""What channels and multiply-adds of each layer take, fitted to the times of whole networks.

Fast kernels work on blocks of channels, and a layer with some other number of channels falls back
on slower ones. The size of the block depends on the device and on the kernels, so it is found by
cross-validation. Layers are assumed to be alike as far as the times allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from anywidth.planning.groups import Plan
from anywidth.width import ChannelConfig

Terms = tuple[float, float, float, float]
"""Of a layer: the channels it makes, its multiply-adds, and both again if it is not in blocks."""

BLOCKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of channels that kernels may work on at a time; 1 is any number."""

# How strongly layers are assumed to be alike; chosen on MobileNet v1 in onnxruntime.
_ALIKE = 30.0
_FOLDS = 5
# A block must predict this much better than any number of channels: else it is noise.
_BETTER = 0.9


def layer_terms(plan: Plan, config: ChannelConfig, block: int) -> dict[str, Terms]:
    """The terms of each layer at a configuration."""
    made = {
        name: 0.0 if axis is None else float(plan.axis_size(axis, config))
        for name, axis in plan.outputs.items()
    }
    products = dict.fromkeys(made, 0.0)
    slow: set[str] = set()
    for term in plan.costs:
        sizes = [plan.axis_size(axis, config) for axis in term.axes]
        products[term.layer] = products.get(term.layer, 0.0) + math.prod(sizes, start=term.factor)
        if any(size % block for size in sizes):
            slow.add(term.layer)
    found: dict[str, Terms] = {}
    for name, product in products.items():
        channels = made.get(name, 0.0)
        more = (channels, product) if name in slow else (0.0, 0.0)
        found[name] = (channels, product, *more)
    return found


def predicted(constant: float, layers: Mapping[str, Terms], terms: Mapping[str, Terms]) -> float:
    """Milliseconds from what a unit of each term takes."""
    spent = constant
    for name, amounts in terms.items():
        spent += sum(a * b for a, b in zip(layers[name], amounts, strict=True))
    return max(spent, 1e-6)


def fit(
    plan: Plan, times: Mapping[ChannelConfig, float], block: int
) -> tuple[float, dict[str, Terms]]:
    """The constant and what a unit of each term takes: least squares of the relative error."""
    terms = [layer_terms(plan, config, block) for config in times]
    names = list(terms[0])
    flat = [[one[name][part] for part in range(4) for name in names] for one in terms]
    x = torch.tensor(flat, dtype=torch.float64)
    y = torch.tensor(list(times.values()), dtype=torch.float64)
    totals = x.unflatten(1, (4, len(names))).sum(2)
    columns = torch.cat([torch.ones_like(y)[:, None], totals, x], 1)
    scale = columns.mean(0).clamp(min=1e-12)
    weighted = columns / scale / y[:, None]
    # What tells a layer from the others is pulled to zero.
    pull = torch.full((len(scale),), _ALIKE, dtype=torch.float64)
    pull[:5] = 1e-6
    normal = weighted.T @ weighted + torch.diag(pull)
    solved = torch.linalg.solve(normal, weighted.sum(0)) / scale
    common, own = solved[1:5], solved[5:].unflatten(0, (4, len(names)))
    per_layer = (own + common[:, None]).T.tolist()
    layers = {name: (a, b, c, d) for name, (a, b, c, d) in zip(names, per_layer, strict=True)}
    return float(solved[0]), layers


def best_block(plan: Plan, times: Mapping[ChannelConfig, float]) -> tuple[int, list[float]]:
    """The block that predicts best, and its relative errors on networks left out of the fits."""
    errors = {block: _left_out_errors(plan, times, block) for block in BLOCKS}
    mean = {block: sum(found) / len(found) for block, found in errors.items()}
    best = min(mean, key=lambda block: mean[block])
    if mean[best] > _BETTER * mean[1]:
        best = 1
    return best, errors[best]


def _left_out_errors(plan: Plan, times: Mapping[ChannelConfig, float], block: int) -> list[float]:
    """The relative error of each network, predicted by a fit without it.

    The first two are the widest and the narrowest: they stay, so that nothing is predicted beyond
    what was fitted.
    """
    configs: Sequence[ChannelConfig] = list(times)
    found = []
    for fold in range(_FOLDS):
        left_out = configs[2 + fold :: _FOLDS]
        kept = {config: times[config] for config in configs if config not in left_out}
        constant, layers = fit(plan, kept, block)
        for config in left_out:
            guess = predicted(constant, layers, layer_terms(plan, config, block))
            found.append(abs(guess / times[config] - 1))
    return found
