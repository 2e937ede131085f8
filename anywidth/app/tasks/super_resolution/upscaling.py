"""Upscale pictures with a trained network, and measure the quality."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from anywidth.app.tasks.super_resolution.image_quality import luma, psnr, ssim
from anywidth.app.tasks.super_resolution.pictures import PicturePairs
from anywidth.app.tasks.super_resolution.resize import round_to_uint8, upscale
from anywidth.app.tasks.super_resolution.tiling import run_tiled
from anywidth.models.wdsr import WDSR
from anywidth.training.precision import tf32_arithmetic

Sets = Mapping[str, PicturePairs]
"""Evaluation pictures by the name of their set."""
Measure = Callable[..., Tensor]
_METRICS: dict[str, Measure] = {"psnr": psnr, "ssim": ssim}


@torch.no_grad()
def super_resolve(model: WDSR, images: Tensor, *, shows_progress: bool = False) -> Tensor:
    """Upscale (N, 3, H, W) images in [0, 1] of any size, at the current width.

    Large images are processed in tiles that overlap by the receptive radius, so there are no seams.
    The result is in [0, 1], on the device of `images`.
    """
    device = next(model.parameters()).device

    def run(tile: Tensor) -> Tensor:
        return model(tile.to(device).contiguous(memory_format=torch.channels_last)).clamp_(0, 1)

    radius = model.receptive_radius
    with tf32_arithmetic(False):
        return run_tiled(
            run,
            images,
            scale=model.scale,
            tile=max(256, 4 * radius),
            overlap=radius,
            shows_progress=shows_progress,
        )


def predict(model: WDSR, low: Tensor) -> Tensor:
    """The 8-bit upscaled picture of one (3, H, W), for measuring."""
    device = next(model.parameters()).device
    return round_to_uint8(super_resolve(model, low[None].to(device).float() / 255))[0]


def evaluate(model: WDSR, sets: Sets) -> dict[str, float]:
    """PSNR in dB and SSIM at the current width, as papers report them."""
    return _evaluate(partial(predict, model), sets)


def mean_psnr(model: WDSR, sets: Sets, count: int) -> float:
    """PSNR over the first `count` pictures, for validation: SSIM takes longer than the network."""
    pairs = ((p[index], p.scale) for p in sets.values() for index in range(len(p)))
    scores = [
        _score(psnr, predict(model, low), high, scale)
        for (low, high), scale in itertools.islice(pairs, max(1, count))
    ]
    return sum(scores) / len(scores)


def evaluate_bicubic(sets: Sets) -> dict[str, float]:
    """The same for bicubic upscaling, the baseline."""
    scale = next(iter(sets.values())).scale
    return _evaluate(lambda low: upscale(low[None], scale)[0], sets)


def _evaluate(enlarge: Callable[[Tensor], Tensor], sets: Sets) -> dict[str, float]:
    """The mean over all sets, with equal weight per set, and the mean of each set."""
    means: dict[str, dict[str, float]] = {}
    for name, pairs in sets.items():
        scores: dict[str, list[float]] = {metric: [] for metric in _METRICS}
        for index in range(len(pairs)):
            low, high = pairs[index]
            made = enlarge(low)
            for metric, measure in _METRICS.items():
                scores[metric].append(_score(measure, made, high, pairs.scale))
        means[name] = {metric: sum(found) / len(found) for metric, found in scores.items()}
    values = {
        metric: sum(mean[metric] for mean in means.values()) / len(means) for metric in _METRICS
    }
    if len(means) > 1:
        for name, mean in means.items():
            values |= {f"{metric}_{name}": value for metric, value in mean.items()}
    return values


def _score(measure: Measure, made: Tensor, true: Tensor, scale: int) -> float:
    return float(measure(luma(made[None]), luma(true[None].to(made.device)), border=scale))
