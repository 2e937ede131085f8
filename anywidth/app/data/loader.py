"""Batches from images that are all on the device."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anywidth.app.data.arrays import ImageArrays
from anywidth.app.data.augment import apply_parameters, draw_parameters, normalize
from anywidth.app.data.order import ImageLoader
from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed


class DeviceLoader(ImageLoader):
    """Yield normalised (images, labels) batches of arrays on ``device``.

    The order of an epoch is drawn from (seed, epoch) and the augmentation of a step from (seed,
    epoch, step), for the global batch of ``batch_size`` samples; each rank uses its part of both.
    Therefore all ranks together see what one process sees, and an epoch that is resumed at step
    ``start`` continues bit for bit.

    Without ``drop_last`` the last batch may be shorter. Ranks then get contiguous parts that
    differ by at most one sample, and empty parts if there are fewer samples than ranks.
    """

    def __init__(
        self, arrays: ImageArrays, *, mean: Sequence[float], std: Sequence[float], **options: Any
    ) -> None:
        """Keep ``arrays`` on the device; ``options``, with an Augmentation, as in ImageLoader.

        Arrays that are already on the device are not copied: several loaders can use different
        positions of the same images.
        """
        channels = arrays.images.shape[1]
        if not len(mean) == len(std) == channels:
            raise AnywidthError(
                f"mean {tuple(mean)} and std {tuple(std)}: expected {channels} values each, one "
                "per channel; channel_statistics(arrays.images) computes them"
            )
        super().__init__(len(arrays), mean, std, **options)
        self.arrays = arrays.to(self.device)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = self.order.permutation(epoch)
        if self.positions is not None:
            order = self.positions[order]
        order = order.to(self.device)
        for step in range(start, len(self)):
            batch, part = self.order.batch(step), self.order.part(step)
            chosen = order[batch][part]
            images = self.arrays.images.index_select(0, chosen)
            if self.augmentation is not None:
                generator = torch.Generator(self.device)
                generator.manual_seed(derive_seed("augment", self.order.seed, epoch, step))
                parameters = draw_parameters(batch.stop - batch.start, generator)[:, part]
                images = apply_parameters(images, self.augmentation, parameters, fill=self._mean)
            labels = self.arrays.labels.index_select(0, chosen)
            yield normalize(images, self._mean, self._std), labels
