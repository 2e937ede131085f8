"""Run a super-resolution network over an image of any size, tile by tile, without seams."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anywidth.measuring.shown_progress import tracked_if_shown


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
        scale: factor by which the network enlarges an image.
        tile: the largest side of the network's input, including overlap. All tiles of an image have
            the same shape.
        overlap: pixels shared with each neighbour, less than half of `tile`.
        shows_progress: show how many tiles are done, if there are several.
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
