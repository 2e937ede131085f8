"""What a classification task gets from the name of its data."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anywidth.app.data.augment import Augmentation
from anywidth.app.data.classification import ClassificationData, load_classification
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.order import ImageLoader
from anywidth.errors import AnywidthError


def all_labels(loader: ImageLoader) -> Tensor:
    return torch.cat([labels for _, labels in loader])


def all_images(loader: ImageLoader) -> list[bytes]:
    return [image.numpy().tobytes() for images, _ in loader for image in images]


@pytest.fixture(scope="module")
def bundled() -> ClassificationData:
    return load_classification(augmentation=Augmentation(crop_padding=2), limit=500)


def test_the_default_needs_nothing(bundled: ClassificationData) -> None:
    assert bundled.input_shape == (1, 28, 28)
    assert bundled.classes[0] == "T-shirt/top"
    assert (bundled.train.samples, len(bundled.train)) == (500, 3)
    assert bundled.validation.samples == 2000
    images, labels = next(bundled.train.epoch(0))
    assert images.shape == (128, 1, 28, 28)
    assert labels.dtype == torch.int64


def test_limited_training_images_are_balanced(bundled: ClassificationData) -> None:
    assert torch.bincount(all_labels(bundled.calibration)).tolist() == [50] * 10


def test_training_images_have_mean_zero_and_deviation_one(bundled: ClassificationData) -> None:
    images = torch.cat([images for images, _ in bundled.calibration])
    assert float(images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(images.std()) == pytest.approx(1, abs=1e-3)
    assert 0.2 < bundled.mean[0] < 0.4
    assert 0.3 < bundled.std[0] < 0.4


def test_calibration_is_the_training_images_plain_and_shuffled_once(
    bundled: ClassificationData,
) -> None:
    plain = load_classification(augmentation=None, limit=500, batch_size=500)
    assert sorted(all_images(bundled.calibration)) == sorted(all_images(plain.train))
    assert all_images(bundled.calibration) == all_images(plain.calibration)
    other = load_classification(limit=500, seed=1)
    assert all_images(bundled.calibration) != all_images(other.calibration)


def test_a_split_holds_out_a_tenth_of_each_class_for_every_seed() -> None:
    first, second = (load_classification(validation="split", seed=seed) for seed in (0, 1))
    assert (first.train.samples, first.validation.samples) == (9000, 1000)
    assert torch.bincount(all_labels(first.validation)).tolist() == [100] * 10
    assert all_images(first.validation) == all_images(second.validation)
    assert not set(all_images(first.validation)) & set(all_images(first.calibration))


def test_ranks_share_one_batch() -> None:
    options = {"limit": 64, "batch_size": 32, "augmentation": Augmentation()}
    whole = next(load_classification(**options).train.epoch(0))[0]
    parts = [
        next(load_classification(rank=rank, world_size=2, **options).train.epoch(0))[0]
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("as_name", [True, False])
def test_a_folder_gives_the_same_kind_of_data(image_folder: Path, as_name: bool) -> None:
    name, root = (str(image_folder), None) if as_name else ("folder", image_folder)
    data = load_classification(
        name,
        root,
        batch_size=4,
        evaluation_batch_size=5,
        image_size=28,
        augmentation=FolderAugmentation(),
        workers=0,
        limit=8,
    )
    assert data.classes == ("cat", "dog")
    assert data.input_shape == (3, 28, 28)
    assert (data.train.samples, len(data.train)) == (8, 2)
    assert torch.bincount(all_labels(data.calibration)).tolist() == [4, 4]
    assert all_labels(data.validation).tolist() == [0, 0, 0, 1, 1, 1]
    assert next(data.train.epoch(1))[0].shape == (4, 3, 28, 28)
    assert data.validation.resize == 32


def test_a_folder_without_val_can_be_split(image_folder: Path) -> None:
    (image_folder / "val").rename(image_folder / "unused")
    options = {"batch_size": 2, "workers": 0, "image_size": 16}
    with pytest.raises(AnywidthError, match="val"):
        load_classification("folder", image_folder, **options)
    data = load_classification("folder", image_folder, validation="split", **options)
    assert (data.train.samples, data.validation.samples) == (10, 2)


def test_corrupt_files_are_skipped_only_if_asked(image_folder: Path) -> None:
    (image_folder / "val" / "cat" / "0.jpg").write_bytes(b"nothing")
    options = {"batch_size": 2, "workers": 0, "image_size": 16}
    strict = load_classification("folder", image_folder, **options)
    with pytest.raises(AnywidthError, match=r"val/cat/0\.jpg"):
        all_labels(strict.validation)
    lenient = load_classification("folder", image_folder, skip_corrupt=True, **options)
    assert all_labels(lenient.validation).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("cifar",), {}, "'cifar'"),
        (("folder",), {}, "--data-dir"),
        (("/no/such/folder",), {}, "/no/such/folder/train"),
        (("bundled",), {"validation": "train"}, "'split'"),
        (("bundled",), {"image_size": 32}, "image-size"),
        (("bundled",), {"augmentation": FolderAugmentation()}, "an Augmentation"),
        (("/tmp",), {"augmentation": Augmentation()}, "FolderAugmentation"),
        (("bundled",), {"limit": 100}, "batch-size"),
        (("bundled",), {"limit": 0}, "0 samples"),
    ],
)
def test_bad_requests_say_what_is_expected(
    arguments: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(AnywidthError, match=message):
        load_classification(*arguments, **options)


@pytest.mark.parametrize(("name", "package"), [("folder", "PIL"), ("cifar10", "torchvision")])
def test_a_missing_package_is_named(name: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from anywidth.app.data.classification import load_classification\n"
        f"load_classification({name!r}, {str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("anywidth.errors.AnywidthError: ")
    assert "pip install 'anywidth[cli]'" in last


def test_bundled_images_need_torch_alone() -> None:
    program = (
        "import sys; from anywidth.app.data.classification import load_classification\n"
        "next(iter(load_classification(limit=200).train))\n"
        "print([name for name in ('torchvision', 'PIL', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("validation", ["test", "split"])
def test_images_for_a_search_are_kept_out_of_training(validation: str) -> None:
    data = load_classification("bundled", held_out=0.1, validation=validation, limit=500)
    plain = load_classification("bundled", validation=validation)
    assert data.is_held_out
    assert plain.is_held_out == (validation == "split")
    assert data.judging.samples == pytest.approx(0.1 * plain.train.samples, rel=0.01)
    assert data.train.samples == 500
    positions = [set(one.positions.tolist()) for one in (data.judging, data.train)]
    assert not positions[0] & positions[1]
    if validation == "split":
        assert not positions[0] & set(data.validation.positions.tolist())
    assert plain.judging.samples == (1000 if validation == "split" else plain.train.samples)
