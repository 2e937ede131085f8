"""The samples of each step of an epoch, and each rank's part of them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed


@dataclass(frozen=True)
class BatchOrder:
    """Split the samples of an epoch into global batches, and each batch into one part per rank.

    ``batch_size`` counts all ranks together. With ``drop_last`` all parts have the same size.
    Without it the last batch may be shorter: its parts then differ by at most one sample, and
    some are empty if there are fewer samples than ranks.
    """

    samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise AnywidthError(
                f"{self.samples} samples: a loader needs at least one; pass more images"
            )
        if not 0 <= self.rank < self.world_size:
            raise AnywidthError(
                f"rank {self.rank} of world_size {self.world_size}: "
                "expected 0 <= rank < world_size; pass the values of torch.distributed"
            )
        if self.batch_size < self.world_size:
            raise AnywidthError(
                f"--batch-size {self.batch_size} counts all {self.world_size} ranks together and "
                f"leaves some without a sample: give --batch-size {self.world_size} or more"
            )
        if self.drop_last and self.batch_size % self.world_size:
            fitting = self.batch_size - self.batch_size % self.world_size
            raise AnywidthError(
                f"--batch-size {self.batch_size} does not split evenly over {self.world_size} "
                f"ranks, which training needs: give --batch-size {fitting} or another multiple"
            )
        if self.drop_last and self.samples < self.batch_size:
            counted = "1 sample" if self.samples == 1 else f"{self.samples} samples"
            raise AnywidthError(
                f"--batch-size {self.batch_size} is larger than the {counted}, so no batch would "
                f"be full: give --batch-size {self.samples} or less"
            )

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        """Return the order of all samples in one epoch, drawn on the CPU from (seed, epoch)."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.samples, generator=generator)

    def batch(self, step: int) -> slice:
        """Return the slice of the permutation that is the global batch of ``step``."""
        start = step * self.batch_size
        return slice(start, min(start + self.batch_size, self.samples))

    def part(self, step: int) -> slice:
        """Return the slice of the global batch of ``step`` that is this rank's part."""
        batch = self.batch(step)
        size = batch.stop - batch.start
        return slice(size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size)

    def check_start(self, epoch: int, start: int) -> None:
        """Refuse a start that is not a step of the epoch."""
        if epoch < 0 or not 0 <= start <= len(self):
            raise AnywidthError(
                f"epoch={epoch}, start={start}: expected epoch >= 0 and start from 0 to "
                f"{len(self)}, the steps of an epoch"
            )


class OrderedLoader(ABC):
    """The base of the loaders: epochs that can start at any step, in a fixed order.

    A loader sets `order` and yields the batches of an epoch in `_batches`.
    """

    order: BatchOrder

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return len(self.order)

    @property
    def samples(self) -> int:
        """The samples of all ranks; an epoch may leave some out (drop_last, corrupt files)."""
        return self.order.samples

    @property
    def batch_size(self) -> int:
        """The samples of a full batch, all ranks together."""
        return self.order.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each batch of an epoch, from step ``start`` on."""
        self.order.check_start(epoch, start)
        return self._batches(epoch, start)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each batch from step ``start`` on."""


class ImageLoader(OrderedLoader):
    """A loader of labelled, normalised images on a device, from which a few can be chosen.

    It has all of its images, or only those at ``positions``. ``order`` are fields of BatchOrder.
    """

    def __init__(
        self,
        images: int,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Any = None,
        device: torch.device | str = "cpu",
        positions: Tensor | None = None,
        **order: Any,
    ) -> None:
        self.device = torch.device(device)
        self.augmentation = augmentation
        self.positions = None if positions is None else positions.cpu()
        self.order = BatchOrder(images if positions is None else len(positions), **order)
        self._mean, self._std = (torch.tensor(x, device=self.device) for x in (mean, std))
        self._prepare()

    def _prepare(self) -> None:
        """Called when the order, the positions and the augmentation are known."""

    def subset(
        self, count: int, seed: int = 0, *, batch_size: int | None = None, augmented: bool = False
    ) -> Self:
        """Return a loader over ``count`` random images in one fixed random order.

        It shares the images and keeps the last, shorter batch. Unless ``augmented``, images are
        preprocessed as for evaluation.
        """
        chosen = choose_subset(self.samples, count, seed)
        twin = copy.copy(self)
        twin.positions = chosen if self.positions is None else self.positions[chosen]
        twin.augmentation = self.augmentation if augmented else None
        size = batch_size or self.batch_size
        twin.order = replace(
            self.order, samples=count, batch_size=size, shuffle=False, drop_last=False
        )
        twin._prepare()
        return twin


def choose_subset(samples: int, count: int, seed: int) -> Tensor:
    """Return ``count`` of ``samples`` positions at random, in random order."""
    if not 1 <= count <= samples:
        raise AnywidthError(
            f"subset of {count} samples: expected 1 to {samples}, the number of samples"
        )
    generator = torch.Generator().manual_seed(derive_seed("subset", seed))
    return torch.randperm(samples, generator=generator)[:count]


def choose_balanced(labels: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions that keep the classes balanced, in ascending order.

    Classes take turns; a class without further samples is skipped.
    """
    samples = len(labels)
    if not 1 <= count <= samples:
        raise AnywidthError(
            f"limit of {count} samples: expected 1 to {samples}, the number of samples"
        )
    # Within a turn, classes come in the order of their labels.
    ranking = torch.argsort(_turns(labels) * (labels.max() + 1) + labels, stable=True)
    return ranking[:count].sort().values


def hold_out(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the remaining and the held-out positions: a random ``share`` of every class."""
    shuffled = choose_subset(len(labels), len(labels), seed)
    in_order = labels[shuffled]
    quota = (torch.bincount(labels) * share).round()
    held = torch.empty(len(labels), dtype=torch.bool)
    held[shuffled] = _turns(in_order) < quota[in_order]
    if not held.any():
        raise AnywidthError(
            f"holding out {share} of each class leaves nothing to validate on: the largest class "
            f"has {int(torch.bincount(labels).max())} samples; give --validation test"
        )
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def _turns(labels: Tensor) -> Tensor:
    """Return how many samples of the same class come before each sample."""
    by_class = torch.argsort(labels, stable=True)
    sizes = torch.bincount(labels)
    first_of_class = torch.cumsum(sizes, 0) - sizes
    turns = torch.empty_like(labels)
    turns[by_class] = torch.arange(len(labels)) - first_of_class[labels[by_class]]
    return turns
