"""Batches of arrays on the device: order, ranks, resuming, subsets."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anywidth.app.data.arrays import ImageArrays, load_arrays
from anywidth.app.data.augment import Augmentation, channel_statistics
from anywidth.app.data.loader import DeviceLoader
from anywidth.errors import AnywidthError

Batches = list[tuple[Tensor, Tensor]]
STRONG = Augmentation(cutout=6)


@pytest.fixture(scope="module")
def fashion() -> ImageArrays:
    arrays = load_arrays("bundled", train=False)
    return replace(arrays, images=arrays.images[:100], labels=arrays.labels[:100])


def make(arrays: ImageArrays, **options: object) -> DeviceLoader:
    mean, std = channel_statistics(arrays.images)
    return DeviceLoader(arrays, **{"batch_size": 16, "mean": mean, "std": std, **options})


def values(batches: Batches) -> list[list[int]]:
    """Return the numbers that `numbered` images hold, from loaders that do not normalise."""
    return [images[:, 0, 0, 0].mul(255).round().int().tolist() for images, _ in batches]


def unnormalised(arrays: ImageArrays, **options: object) -> DeviceLoader:
    return make(arrays, mean=(0.0,), std=(1.0,), **options)


def assert_equal(first: Batches, second: Batches) -> None:
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def test_without_shuffling_batches_come_in_order(numbered: ImageArrays) -> None:
    loader = unnormalised(numbered, batch_size=4)
    assert values(list(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (len(loader), loader.samples, loader.batch_size) == (3, 10, 4)
    dropping = unnormalised(numbered, batch_size=4, drop_last=True)
    assert values(list(dropping)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(dropping) == 2


def test_labels_stay_with_their_images(numbered: ImageArrays) -> None:
    loader = unnormalised(numbered, batch_size=4, shuffle=True)
    batches = list(loader.epoch(5))
    for numbers, (_, labels) in zip(values(batches), batches, strict=True):
        assert labels.tolist() == [number % 3 for number in numbers]
    assert sorted(number for batch in values(batches) for number in batch) == list(range(10))
    assert values(batches) != values(list(loader.epoch(6)))


def test_images_are_normalised(fashion: ImageArrays) -> None:
    images = torch.cat([images for images, _ in make(fashion)])
    assert images.dtype == torch.float32
    assert float(images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(images.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("augmentation", [None, STRONG])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_epoch_goes_on_bit_for_bit(
    fashion: ImageArrays, augmentation: Augmentation | None, drop_last: bool
) -> None:
    options = {"augmentation": augmentation, "shuffle": True, "drop_last": drop_last, "seed": 3}
    whole = list(make(fashion, **options).epoch(2))
    torch.manual_seed(99)
    loader = make(fashion, **options)
    next(loader.epoch(0))
    for start in (0, 1, len(loader) - 1, len(loader)):
        assert_equal(list(loader.epoch(2, start)), whole[start:])


@pytest.mark.parametrize("augmentation", [None, STRONG])
@pytest.mark.parametrize(
    ("world_size", "shuffle", "drop_last"), [(2, True, True), (3, False, False), (4, True, False)]
)
def test_ranks_together_see_what_one_process_sees(
    fashion: ImageArrays,
    augmentation: Augmentation | None,
    world_size: int,
    shuffle: bool,
    drop_last: bool,
) -> None:
    options = {"augmentation": augmentation, "shuffle": shuffle, "drop_last": drop_last}
    alone = list(make(fashion, **options).epoch(1))
    ranks = [
        list(make(fashion, rank=rank, world_size=world_size, **options).epoch(1))
        for rank in range(world_size)
    ]
    together = [
        (torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
        for parts in zip(*ranks, strict=True)
    ]
    assert_equal(together, alone)


def test_a_last_batch_smaller_than_the_ranks_leaves_some_empty(numbered: ImageArrays) -> None:
    sizes = []
    for rank in range(4):
        loader = unnormalised(numbered, batch_size=8, rank=rank, world_size=4)
        last_images, last_labels = list(loader)[-1]
        assert last_images.shape[1:] == (1, 4, 4)
        sizes.append((len(last_images), len(last_labels)))
    assert sorted(sizes) == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_augmentation_differs_between_steps_epochs_and_seeds(fashion: ImageArrays) -> None:
    first = torch.zeros(64, dtype=torch.int64)
    one_image = replace(fashion, images=fashion.images[first], labels=fashion.labels[first])
    loader = make(one_image, augmentation=STRONG, mean=(0.0,), std=(1.0,))
    other = make(one_image, augmentation=STRONG, mean=(0.0,), std=(1.0,), seed=1)
    batches = [images for epoch in (0, 1) for images, _ in loader.epoch(epoch)]
    batches.extend(images for images, _ in other.epoch(0))
    for number, batch in enumerate(batches):
        assert not any(torch.equal(batch, later) for later in batches[number + 1 :])


def test_the_global_random_state_is_left_alone(fashion: ImageArrays) -> None:
    before = torch.get_rng_state()
    list(make(fashion, augmentation=STRONG, shuffle=True).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_subset_is_fixed_plain_and_shares_the_images(fashion: ImageArrays) -> None:
    loader = make(fashion, augmentation=STRONG, shuffle=True, drop_last=True)
    subset = loader.subset(40, seed=1)
    assert (subset.samples, len(subset)) == (40, 3)
    assert subset.arrays.images.data_ptr() == loader.arrays.images.data_ptr()
    assert_equal(list(subset.epoch(0)), list(subset.epoch(1)))
    plain = torch.cat([images for images, _ in make(fashion)])
    images = torch.cat([images for images, _ in subset])
    matches = (images[:, None] == plain[None]).flatten(2).all(2)
    assert torch.equal(matches.sum(1).clamp(max=1), torch.ones(40, dtype=torch.int64))
    augmented = loader.subset(40, seed=1, augmented=True, batch_size=40)
    assert not torch.equal(next(iter(augmented))[0], images)
    with pytest.raises(AnywidthError, match="101"):
        loader.subset(101)


def test_a_subset_of_a_subset_stays_within_it(numbered: ImageArrays) -> None:
    first = unnormalised(numbered, batch_size=10).subset(5, seed=4)
    second = first.subset(3, seed=5)
    assert set(values(list(second))[0]) < set(values(list(first))[0])


def test_bad_requests_are_refused_at_once(numbered: ImageArrays) -> None:
    with pytest.raises(AnywidthError, match="1 value"):
        make(numbered, mean=(0.0, 0.0), std=(1.0, 1.0))
    with pytest.raises(AnywidthError, match="start"):
        make(numbered, batch_size=4).epoch(0, 4)
    with pytest.raises(AnywidthError, match="larger"):
        make(numbered, drop_last=True)
