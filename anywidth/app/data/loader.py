"""Batches from images that are all on the device."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anywidth.app.data.arrays import ImageArrays
from anywidth.app.data.augment import Augmentation, apply_parameters, draw_parameters, normalize
from anywidth.app.data.order import BatchOrder, OrderedLoader, choose_subset
from anywidth.errors import AnywidthError
from anywidth.seeds import derive_seed


class DeviceLoader(OrderedLoader):
    """Yield normalised (images, labels) batches of arrays on ``device``.

    The order of an epoch is drawn from (seed, epoch) and the augmentation of a step from (seed,
    epoch, step), for the global batch of ``batch_size`` samples; each rank uses its part of both.
    Therefore all ranks together see what one process sees, and an epoch that is resumed at step
    ``start`` continues bit for bit.

    Without ``drop_last`` the last batch may be shorter. Ranks then get contiguous parts that
    differ by at most one sample, and empty parts if there are fewer samples than ranks.
    """

    def __init__(
        self,
        arrays: ImageArrays,
        *,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
        augmentation: Augmentation | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        positions: Tensor | None = None,
    ) -> None:
        """Keep ``arrays``, or only the samples at ``positions``, on ``device``.

        Arrays that are already on the device are not copied: several loaders can use different
        positions of the same images.
        """
        channels = arrays.images.shape[1]
        if not len(mean) == len(std) == channels:
            raise AnywidthError(
                f"mean {tuple(mean)} and std {tuple(std)}: expected {channels} values each, one "
                "per channel; channel_statistics(arrays.images) computes them"
            )
        self.device = torch.device(device)
        self.arrays = arrays.to(self.device)
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.augmentation = augmentation
        self.positions = None if positions is None else positions.cpu()
        self.order = BatchOrder(
            samples=len(arrays) if positions is None else len(positions),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._mean = torch.tensor(self.mean, device=self.device)
        self._std = torch.tensor(self.std, device=self.device)

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

    def subset(
        self, count: int, seed: int = 0, *, batch_size: int | None = None, augmented: bool = False
    ) -> "DeviceLoader":
        """Return a loader over ``count`` random samples in one fixed random order.

        It keeps the last, shorter batch and shares the images. Unless ``augmented``, images are
        not augmented.
        """
        chosen = choose_subset(self.samples, count, seed)
        return DeviceLoader(
            self.arrays,
            batch_size=batch_size or self.batch_size,
            mean=self.mean,
            std=self.std,
            seed=self.order.seed,
            augmentation=self.augmentation if augmented else None,
            device=self.device,
            rank=self.order.rank,
            world_size=self.order.world_size,
            positions=chosen if self.positions is None else self.positions[chosen],
        )
