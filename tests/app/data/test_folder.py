"""Folders in ImageNet's layout: decoding, workers, ranks, resuming, faulty files."""

import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from anywidth.app.data import decoding_workers, folder_images
from anywidth.app.data.classification import load_classification
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.image_files import ImageFiles, check_same_classes, scan_split
from anywidth.errors import AnywidthError

Batches = list[tuple[Tensor, Tensor]]
SMALL = {"batch_size": 4, "size": 16, "resize": 20, "workers": 0}
MOBILE = FolderAugmentation()
# Python 3.12 and 3.13 warn of any fork once another thread runs; torch starts some.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def make(files: ImageFiles, **options: object) -> FolderLoader:
    return FolderLoader(files, **{**SMALL, **options})


def assert_equal(first: Batches, second: Batches) -> None:
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_files_are_listed_with_their_labels(image_folder: Path) -> None:
    accented = image_folder / "train" / "dog" / "été.jpg"
    (image_folder / "train" / "dog" / "5.jpg").rename(accented)
    files = scan_split(image_folder, "train")
    assert files.classes == ("cat", "dog")
    assert files.labels.tolist() == [0] * 6 + [1] * 6
    listed = [files.path(index) for index in range(len(files))]
    assert listed == sorted((image_folder / "train").glob("*/*.jpg"))
    assert listed[-1] == accented


def test_evaluation_resizes_and_cuts_the_centre(image_folder: Path) -> None:
    files = scan_split(image_folder, "val")
    loader = make(files, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = torch.cat([images for images, _ in loader])
    labels = torch.cat([labels for _, labels in loader])
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    for index, got in enumerate(images):
        with Image.open(files.path(index)) as image:
            # 40 x 30 becomes 26 x 20, of which the central 16 x 16 is kept.
            small = pil_to_tensor(image.resize((26, 20), Image.Resampling.BILINEAR))
        expected = small[:, 2:18, 5:21]
        assert torch.equal(got.mul(255).round().byte(), expected)


def test_normalisation_is_imagenet_s_unless_given(image_folder: Path) -> None:
    files = scan_split(image_folder, "val")
    plain, _ = next(iter(make(files, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))))
    got, _ = next(iter(make(files)))
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    torch.testing.assert_close(got, (plain - mean) / std, rtol=0, atol=1e-5)


@forks
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on one core
def test_workers_resuming_and_ranks_do_not_change_what_is_seen(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    options = {"augmentation": MOBILE, "shuffle": True, "drop_last": True, "seed": 7}
    alone = list(make(files, **options).epoch(3))
    torch.manual_seed(99)
    by_workers = make(files, workers=2, **options)
    next(by_workers.epoch(0))
    assert_equal(list(by_workers.epoch(3)), alone)
    assert_equal(list(by_workers.epoch(3, 1)), alone[1:])
    assert list(by_workers.epoch(3, 3)) == []
    ranks = [list(make(files, rank=rank, world_size=2, **options).epoch(3)) for rank in (0, 1)]
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([first[0], second[0]]), whole[0])
        assert torch.equal(torch.cat([first[1], second[1]]), whole[1])


def test_augmentation_differs_between_epochs_and_images(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    loader = make(files, augmentation=MOBILE, batch_size=12, seed=1)
    first, second = (next(loader.epoch(epoch))[0] for epoch in (0, 1))
    assert first.shape == (12, 3, 16, 16)
    assert not any(torch.equal(image, other) for image, other in zip(first, second, strict=True))


def test_half_of_the_training_images_are_mirrored(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "ramp"
    folder.mkdir(parents=True)
    ramp = torch.arange(0, 240, 8).byte().expand(3, 30, 30).permute(1, 2, 0)
    for number in range(60):
        Image.fromarray(ramp.numpy()).save(folder / f"{number}.png")
    loader = make(scan_split(tmp_path, "train"), augmentation=MOBILE, batch_size=60)
    images, _ = next(iter(loader))
    rising = images[..., -1].mean((1, 2)) > images[..., 0].mean((1, 2))
    assert 18 <= int(rising.sum()) <= 42
    unmirrored = FolderAugmentation(flip=False)
    loader = make(scan_split(tmp_path, "train"), augmentation=unmirrored, batch_size=60)
    images, _ = next(iter(loader))
    assert bool((images[..., -1].mean((1, 2)) > images[..., 0].mean((1, 2))).all())


def test_lighting_of_a_loader_differs_between_images(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "grey"
    folder.mkdir(parents=True)
    for number in range(60):
        Image.new("RGB", (20, 20), (128, 128, 128)).save(folder / f"{number}.png")
    files = scan_split(tmp_path, "train")
    plain = FolderAugmentation(jitter=0.0, lighting=0.1)
    images, _ = next(iter(make(files, augmentation=plain, batch_size=60, mean=(0.0,) * 3,
                               std=(1.0,) * 3)))  # fmt: skip
    shifts = images[:, :, 0, 0] - 128 / 255
    # Of each channel: 0.1 * sqrt(sum of (eigenvalue * its part of the vector) ** 2), near 0.0125.
    assert torch.all((shifts.std(0) > 0.009) & (shifts.std(0) < 0.016))
    assert torch.all(images == images[:, :, :1, :1])


def test_the_global_random_state_is_left_alone(image_folder: Path) -> None:
    loader = make(scan_split(image_folder, "train"), augmentation=MOBILE, shuffle=True)
    before = torch.get_rng_state()
    list(loader.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


@forks
def test_batches_of_many_parts_that_share_few_slots_are_whole(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = scan_split(image_folder, "train")
    options = {"augmentation": MOBILE, "shuffle": True, "batch_size": 5, "seed": 3}
    whole = list(make(files, **options).epoch(1))
    monkeypatch.setattr(folder_images, "_MOST_IMAGES", 1)
    by_worker = make(files, workers=1, **options)
    # Left in the middle: what its worker still decodes must not reach the next epoch.
    next(by_worker.epoch(0))
    assert_equal(list(by_worker.epoch(1)), whole)
    assert_equal(list(by_worker.epoch(1, 1)), whole[1:])


def test_memory_for_decoded_images_does_not_grow_with_the_batch() -> None:
    for size in (32, 224, 512, 4096):
        images = folder_images.images_per_part(size)
        assert 1 <= images <= 32
        assert images == 1 or images * 3 * size * size <= 2**23


@pytest.mark.parametrize("augmentation", [None, MOBILE])
def test_a_skipped_image_leaves_the_others_of_its_batch_as_they_are(
    image_folder: Path, augmentation: FolderAugmentation | None
) -> None:
    files = scan_split(image_folder, "train")
    ((whole, labels),) = make(files, batch_size=12, augmentation=augmentation)
    truncate(image_folder / "train" / "cat" / "2.jpg")
    loader = make(files, batch_size=12, augmentation=augmentation, skip_corrupt=True)
    ((kept, kept_labels),) = loader
    others = [number for number in range(12) if number != 2]
    assert torch.equal(kept, whole[others])
    assert torch.equal(kept_labels, labels[others])


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    assert decoding_workers.default_workers() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert decoding_workers.default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert decoding_workers.default_workers() == 1


def test_a_folder_is_decoded_by_one_worker_per_core_unless_told(image_folder: Path) -> None:
    data = load_classification("folder", image_folder, batch_size=4, image_size=16)
    assert isinstance(data.train, FolderLoader)
    assert data.train.workers == decoding_workers.default_workers()


def test_too_little_shared_memory_is_said(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory: No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(AnywidthError, match="--workers"):
        next(iter(make(scan_split(image_folder, "train"), workers=1)))


@forks
def test_workers_outlive_the_ctrl_c_that_stops_training(image_folder: Path) -> None:
    """It reaches all processes of a terminal, and the step under way still needs its batch."""
    loader = make(scan_split(image_folder, "train"), workers=1)
    batches = loader.epoch(0)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGINT)  # type: ignore[arg-type]
    assert len([*batches, *loader.epoch(1)]) == 2 * len(loader) - 1
    assert worker.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named(image_folder: Path, workers: int) -> None:
    path = truncate(image_folder / "train" / "dog" / "2.jpg")
    loader = make(scan_split(image_folder, "train"), workers=workers)
    with pytest.raises(AnywidthError, match="skip-corrupt") as raised:
        list(loader.epoch(0))
    assert str(path) in str(raised.value)


def test_corrupt_images_are_skipped_and_named_if_asked(
    image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncated = truncate(image_folder / "train" / "cat" / "1.jpg")
    no_image = image_folder / "train" / "dog" / "2.jpg"
    no_image.write_text("not an image")
    loader = make(scan_split(image_folder, "train"), skip_corrupt=True)
    with caplog.at_level(logging.WARNING, logger="anywidth"):
        batches = list(loader.epoch(2))
        list(loader.epoch(3))  # which names no file again
    assert [len(images) for images, _ in batches] == [3, 4, 3]
    assert [labels.tolist() for _, labels in batches] == [[0, 0, 0], [0, 0, 1, 1], [1, 1, 1]]
    assert set(loader.corrupt) == {str(truncated), str(no_image)}
    assert "cannot identify" in loader.corrupt[str(no_image)]
    assert caplog.messages == [f"skipped 2 corrupt images in epoch 2: {truncated}, {no_image}"]
    no_image.unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="anywidth"):
        list(make(scan_split(image_folder, "train"), skip_corrupt=True).epoch(0))
    assert caplog.messages == [f"skipped 1 corrupt image in epoch 0: {truncated}"]


def test_a_training_batch_without_any_whole_image_is_an_error(image_folder: Path) -> None:
    for number in range(4):
        truncate(image_folder / "train" / "cat" / f"{number}.jpg")
    files = scan_split(image_folder, "train")
    images, labels = next(iter(make(files, skip_corrupt=True)))
    assert images.shape == (0, 3, 16, 16)
    assert labels.shape == (0,)
    with pytest.raises(AnywidthError, match="corrupt"):
        next(iter(make(files, skip_corrupt=True, drop_last=True)))


def test_a_file_that_vanished_is_never_taken_for_corrupt(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    vanished = image_folder / "train" / "cat" / "3.jpg"
    vanished.unlink()
    with pytest.raises(AnywidthError, match="FileNotFoundError") as raised:
        list(make(files, skip_corrupt=True))
    assert str(vanished) in str(raised.value)


def test_an_epoch_ends_when_another_begins(image_folder: Path) -> None:
    loader = make(scan_split(image_folder, "train"))
    first = loader.epoch(0)
    next(first)
    second = loader.epoch(1)
    next(second)
    with pytest.raises(AnywidthError, match="epoch 0"):
        next(first)


def test_a_subset_is_fixed_and_evaluated(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    loader = make(files, augmentation=MOBILE, shuffle=True, drop_last=True)
    subset = loader.subset(7, seed=2, batch_size=5)
    assert (subset.samples, len(subset), subset.batch_size) == (7, 2, 5)
    assert_equal(list(subset.epoch(0)), list(subset.epoch(1)))
    plain = torch.cat([images for images, _ in make(files)])
    images = torch.cat([images for images, _ in subset])
    assert (images[:, None] == plain[None]).flatten(2).all(2).sum(1).tolist() == [1] * 7
    augmented = loader.subset(7, seed=2, batch_size=5, augmented=True)
    assert not torch.equal(next(iter(augmented))[0], images[:5])


def test_a_rank_without_a_sample_gets_an_empty_part(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    parts = [
        list(make(files, batch_size=11, rank=rank, world_size=2))[-1][0].shape for rank in (0, 1)
    ]
    assert parts == [(0, 3, 16, 16), (1, 3, 16, 16)]


def test_missing_and_differing_folders_are_said(image_folder: Path) -> None:
    with pytest.raises(AnywidthError, match="nowhere/train"):
        scan_split(image_folder / "nowhere", "train")
    train = scan_split(image_folder, "train")
    (image_folder / "val" / "dog").rename(image_folder / "val" / "wolf")
    with pytest.raises(AnywidthError, match="wolf"):
        check_same_classes(train, scan_split(image_folder, "val"))
    (image_folder / "val").rename(image_folder / "validation")
    with pytest.raises(AnywidthError, match="validation"):
        scan_split(image_folder, "val")
    (image_folder / "train" / "empty").mkdir()
    with pytest.raises(AnywidthError, match="empty"):
        scan_split(image_folder, "train")
    (image_folder / "val").mkdir()
    with pytest.raises(AnywidthError, match="class"):
        scan_split(image_folder, "val")


def test_bad_settings_are_refused(image_folder: Path) -> None:
    files = scan_split(image_folder, "train")
    with pytest.raises(AnywidthError, match="resize"):
        make(files, size=30)
    with pytest.raises(AnywidthError, match="min_area"):
        FolderAugmentation(min_area=0)
    with pytest.raises(AnywidthError, match="lighting"):
        FolderAugmentation(lighting=-0.1)
