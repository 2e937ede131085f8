"""Training patches for super-resolution, cut on the device from whole pictures."""

from collections.abc import Iterator

import torch
from torch import Tensor

from anywidth.app.data.order import BatchOrder, OrderedLoader
from anywidth.app.tasks.super_resolution.pictures import PicturePairs, Pictures
from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed


class PatchLoader(OrderedLoader):
    """Yield (low, high) batches of aligned patches, floating point in [0, 1].

    `low` has shape (batch, 3, patch, patch), `high` is `scale` times as large; both are in
    channels-last memory. Step s of epoch e is drawn from (seed, e, s) for the global batch, and
    each rank uses its part: all ranks together see what one process sees, and an epoch that is
    resumed at step `start` continues bit for bit. Nothing waits for the device.

    Every position is equally likely, so larger pictures are drawn more often. Each patch is rotated
    and mirrored into one of the eight symmetries of the square.

    Args:
        batch_size: patches per step, all ranks together.
        patch: side of a low-resolution patch.
        samples: patches per epoch; by default as many as would cover all pictures once.
        pictures_on_device: also keep all pictures on the device, as bytes; otherwise patches are
            cut on the CPU and copied, for sets larger than the device's memory.
    """

    def __init__(
        self,
        pairs: PicturePairs,
        *,
        batch_size: int = 16,
        patch: int = 48,
        samples: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        pictures_on_device: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        for name, (height, width) in zip(pairs.names, pairs.low.sizes, strict=True):
            if not 1 <= patch <= min(height, width):
                raise AnywidthError(
                    f"--patch {patch} does not fit {name!r}, {height}x{width} at low resolution: "
                    "give a smaller --patch, or leave such pictures out"
                )
        if samples is None:
            samples = max(batch_size, len(pairs.low.pixels) // patch**2)
        self.order = BatchOrder(
            samples, batch_size, seed, drop_last=True, rank=rank, world_size=world_size
        )
        self.patch = patch
        self.scale = pairs.scale
        self.device = torch.device(device)
        self._low, self._high = _Layout(pairs.low), _Layout(pairs.high)
        store = self.device if pictures_on_device else torch.device("cpu")
        self._low_pixels, self._high_pixels = (
            pictures.pixels.to(store) for pictures in (pairs.low, pairs.high)
        )
        rows, columns = (self._low.height - patch + 1, self._low.width - patch + 1)
        self._columns = columns
        self._places = rows * columns
        self._places_up_to = self._places.cumsum(0)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._batch(epoch, step) for step in range(start, len(self)))

    def _batch(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        picture, top, left, symmetry = self._draw(epoch, step)[:, self.order.part(step)]
        low = self._low.walk(picture, top, left, symmetry, self.patch)
        top, left = top * self.scale, left * self.scale
        high = self._high.walk(picture, top, left, symmetry, self.patch * self.scale)
        # One small transfer for both.
        low_walk, high_walk = self._send(torch.stack([low, high]), self._low_pixels.device)
        return (
            self._cut(self._low_pixels, low_walk, self.patch),
            self._cut(self._high_pixels, high_walk, self.patch * self.scale),
        )

    def _draw(self, epoch: int, step: int) -> Tensor:
        """Picture, top, left and symmetry of each patch of the global batch, drawn on the CPU."""
        seed = derive_seed("patches", self.order.seed, epoch, step)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size,)
        place = torch.randint(int(self._places_up_to[-1]), shape, generator=generator)
        picture = torch.searchsorted(self._places_up_to, place, right=True)
        place -= self._places_up_to[picture] - self._places[picture]
        columns = self._columns[picture]
        symmetry = torch.randint(8, shape, generator=generator)
        return torch.stack([picture, place // columns, place % columns, symmetry])

    def _cut(self, pixels: Tensor, walk: Tensor, side: int) -> Tensor:
        """Gather square patches: pixel (i, j) is at first + i * down + j * across."""
        first, down, across = walk.reshape(3, -1, 1, 1)
        along = torch.arange(side, device=walk.device)
        index = first + down * along[:, None] + across * along
        patches = pixels.index_select(0, index.flatten()).view(*index.shape, 3)
        return self._send(patches, self.device).permute(0, 3, 1, 2).float() / 255

    @staticmethod
    def _send(tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device or device.type != "cuda":
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)


class _Layout:
    """The positions of the pictures in their buffer, as tensors."""

    def __init__(self, pictures: Pictures) -> None:
        self.height, self.width = torch.tensor(pictures.sizes).unbind(1)
        self.offset = torch.tensor(pictures.offsets)

    def walk(
        self, picture: Tensor, top: Tensor, left: Tensor, symmetry: Tensor, side: int
    ) -> Tensor:
        """The first pixel of each patch, and the offsets of the next pixel down and across.

        The eight symmetries of the square only change the first pixel and these offsets.
        """
        width = self.width[picture]
        first = self.offset[picture] + top * width + left
        upside_down, mirrored, transposed = (symmetry & bit != 0 for bit in (1, 2, 4))
        first = first + (side - 1) * (width * upside_down + mirrored.long())
        down = torch.where(upside_down, -width, width)
        across = torch.where(mirrored, -1, 1)
        return torch.stack(
            [first, torch.where(transposed, across, down), torch.where(transposed, down, across)]
        )
