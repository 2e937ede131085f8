"""The images inside the package."""

import hashlib
import time
from pathlib import Path

import pytest
import torch

from anywidth.app.data.arrays import BUNDLED, load_arrays

SHA256 = {  # of images and labels as bytes, once decompressed
    True: "73194a0c06a93deab58b95e00e618cc5c80fb5c9a84df26bbc429eeb3507846a",
    False: "8e8b02fc2db0ff9ed2d481ff30f8bd7cc5c88205cb131d7f4a0c19448f6957c9",
}


@pytest.mark.parametrize(("train", "of_a_class"), [(True, 1000), (False, 200)])
def test_bundled_images_are_balanced_and_unchanged(train: bool, of_a_class: int) -> None:
    arrays = load_arrays("bundled", None, train)
    assert arrays.images.shape == (10 * of_a_class, 1, 28, 28)
    assert arrays.images.dtype == torch.uint8
    assert torch.bincount(arrays.labels).tolist() == [of_a_class] * 10
    assert len(arrays.classes) == 10
    content = arrays.images.numpy().tobytes() + arrays.labels.byte().numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == SHA256[train]


def test_training_and_test_images_are_disjoint() -> None:
    def digests(train: bool) -> set[bytes]:
        images = load_arrays("bundled", train=train).images
        return {image.numpy().tobytes() for image in images}

    assert not digests(True) & digests(False)


def test_bundled_files_are_small_licensed_and_quick_to_load() -> None:
    files = [path for path in BUNDLED.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    licence = (BUNDLED / "LICENSE").read_text()
    assert "Zalando SE" in licence
    assert "Permission is hereby granted" in licence
    begin = time.process_time()
    load_arrays("bundled")
    assert time.process_time() - begin < 1


def test_root_is_not_read(tmp_path: Path) -> None:
    assert len(load_arrays("bundled", tmp_path / "nowhere")) == 10_000
