"""Upscale pictures with a trained network, and measure the quality."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from anywidth.app.tasks.super_resolution.image_quality import luma, psnr, ssim
from anywidth.app.tasks.super_resolution.pictures import PicturePairs
from anywidth.app.tasks.super_resolution.resize import round_to_uint8, upscale
from anywidth.measuring.shown_progress import tracked_if_shown
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


@torch.no_grad()
def run_tiled(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    scale: int,
    tile: int = 256,
    overlap: int = 32,
    shows_progress: bool = False,
) -> Tensor:
    """Upscale `image` (N, C, H, W) in tiles; it needs the memory of the result and of one tile.

    Every tile is computed with `overlap` pixels of its neighbours, which are cut off afterwards.
    With at least the network's receptive radius (`WDSR.receptive_radius`) the result equals the
    untiled one; a smaller overlap is faster, but seams may appear.

    Args:
        network: (N, C, h, w) → (N, C', scale * h, scale * w). It may move a tile to its own
            device; the result is on the device of `image`.
        tile: the largest side of the network's input, including overlap. All tiles of an image have
            the same shape.
        overlap: pixels shared with each neighbour, less than half of `tile`.
    """
    result: Tensor | None = None
    across = list(_windows(image.shape[-1], tile, overlap))
    tiles = [(*row, *one) for row in _windows(image.shape[-2], tile, overlap) for one in across]
    is_shown = shows_progress and len(tiles) > 1
    for rows, kept_rows, columns, kept_columns in tracked_if_shown(tiles, "upscaling", is_shown):
        part = network(image[..., rows, columns])
        if result is None:
            height, width = image.shape[-2] * scale, image.shape[-1] * scale
            shape = (*part.shape[:-2], height, width)
            result = torch.empty(shape, dtype=part.dtype, device=image.device)
        inside_rows = _shift(kept_rows, -rows.start, scale)
        inside_columns = _shift(kept_columns, -columns.start, scale)
        target = result[..., _shift(kept_rows, 0, scale), _shift(kept_columns, 0, scale)]
        target.copy_(part[..., inside_rows, inside_columns])
    assert result is not None
    return result


def _windows(length: int, tile: int, overlap: int) -> Iterator[tuple[slice, slice]]:
    """Along one axis: the span that each tile reads, and the part of it that is kept.

    The last tile is moved back instead of made smaller, so that the network sees one shape.
    """
    stride = tile - 2 * overlap
    last_start = max(length - tile, 0)
    starts = [*range(0, last_start, stride), last_start]
    edges = [0, *(start + overlap for start in starts[1:]), length]
    for start, first, last in zip(starts, edges[:-1], edges[1:], strict=True):
        yield slice(start, min(start + tile, length)), slice(first, last)


def _shift(span: slice, offset: int, scale: int) -> slice:
    """The span moved by `offset`, in pixels of the enlarged image."""
    return slice((span.start + offset) * scale, (span.stop + offset) * scale)
