"""Image sets read from the layouts they come in."""

import gzip
import hashlib
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision import datasets

from anywidth.app.data.arrays import ImageArrays, load_arrays
from anywidth.app.data.cifar import CIFAR10, CIFAR100
from anywidth.errors import AnywidthError

ToIdx = Callable[[Tensor], bytes]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def random_images(count: int, channels: int = 3, side: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), generator=generator).byte()


@pytest.mark.parametrize("place", ["", "FashionMNIST/raw", "raw", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("train", [True, False])
def test_idx_files_round_trip(
    tmp_path: Path, to_idx: ToIdx, place: str, suffix: str, train: bool
) -> None:
    images, labels = random_images(5, channels=1, side=28)[:, 0], torch.tensor([9, 0, 3, 3, 1])
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "train" if train else "t10k"
    for name, values in (("images-idx3", images), ("labels-idx1", labels)):
        path = folder / f"{prefix}-{name}-ubyte{suffix}"
        path.write_bytes(COMPRESS[suffix](to_idx(values)))
    arrays = load_arrays("fashion_mnist", tmp_path, train)
    assert torch.equal(arrays.images[:, 0], images)
    assert torch.equal(arrays.labels, labels)
    with pytest.raises(AnywidthError, match=r"t10k-images|train-images"):
        load_arrays("fashion_mnist", tmp_path, not train)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_truncated_idx_file_is_named(tmp_path: Path, to_idx: ToIdx, suffix: str) -> None:
    images = COMPRESS[suffix](to_idx(random_images(5, channels=1, side=28)[:, 0]))
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(images[:-100])
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(to_idx(torch.arange(5)))
    with pytest.raises(AnywidthError, match="expected") as raised:
        load_arrays("fashion_mnist", tmp_path)
    assert str(path) in str(raised.value)
    if not suffix:
        assert str(16 + 5 * 28 * 28) in str(raised.value)


def test_faulty_idx_files_are_refused(tmp_path: Path, to_idx: ToIdx) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    images.write_bytes(to_idx(random_images(4, channels=1, side=28)[:, 0]))
    labels.write_bytes(to_idx(torch.arange(3)))
    with pytest.raises(AnywidthError, match="3 labels"):
        load_arrays("fashion_mnist", tmp_path)
    labels.write_bytes(to_idx(torch.tensor([0, 1, 2, 10])))
    with pytest.raises(AnywidthError, match="label 10"):
        load_arrays("fashion_mnist", tmp_path)
    labels.write_bytes(images.read_bytes())
    with pytest.raises(AnywidthError, match="00000803"):
        load_arrays("fashion_mnist", tmp_path)
    images.write_bytes(b"")
    with pytest.raises(AnywidthError, match="nothing"):
        load_arrays("fashion_mnist", tmp_path)


def write_binary(folder: Path, name: str, images: Tensor, *labels: Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = torch.cat([*(label[:, None].byte() for label in labels), images.flatten(1)], dim=1)
    (folder / name).write_bytes(records.numpy().tobytes())
    return folder / name


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar10_binary_files_round_trip(tmp_path: Path, place: str) -> None:
    images, labels = random_images(12), torch.arange(12) % 10
    for number in range(5):
        part = slice(2 * number, 2 * number + 2)
        name = f"data_batch_{number + 1}.bin"
        write_binary(tmp_path / place, name, images[part], labels[part])
    write_binary(tmp_path / place, "test_batch.bin", images[10:], labels[10:])
    train, test = (load_arrays("cifar10", tmp_path, train) for train in (True, False))
    assert torch.equal(train.images, images[:10])
    assert torch.equal(train.labels, labels[:10])
    assert torch.equal(test.images, images[10:])
    assert test.labels.tolist() == [0, 1]
    assert train.classes[6] == "frog"


def test_cifar100_binary_files_give_fine_labels(tmp_path: Path) -> None:
    images = random_images(4)
    fine, coarse = torch.tensor([99, 0, 52, 7]), torch.tensor([1, 2, 3, 19])
    write_binary(tmp_path / "cifar-100-binary", "train.bin", images, coarse, fine)
    arrays = load_arrays("cifar100", tmp_path)
    assert torch.equal(arrays.images, images)
    assert arrays.labels.tolist() == fine.tolist()
    assert len(arrays.classes) == 100
    assert arrays.classes[52] == "oak_tree"


def test_faulty_cifar_binary_files_are_named(tmp_path: Path) -> None:
    test_file = write_binary(tmp_path, "test_batch.bin", random_images(2), torch.tensor([0, 1]))
    test_file.write_bytes(test_file.read_bytes()[:-1])
    with pytest.raises(AnywidthError, match="6145"):
        load_arrays("cifar10", tmp_path, train=False)
    write_binary(tmp_path, "test_batch.bin", random_images(2), torch.tensor([0, 10]))
    with pytest.raises(AnywidthError, match="label 10"):
        load_arrays("cifar10", tmp_path, train=False)
    write_binary(tmp_path, "data_batch_4.bin", random_images(1), torch.tensor([0]))
    with pytest.raises(AnywidthError, match=r"data_batch_1\.bin"):
        load_arrays("cifar10", tmp_path)


def write_pickles(
    root: Path, kind: type, labels_key: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, list[int]]:
    """Write torchvision's folder and tell torchvision the MD5 of what was written."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    images, labels = random_images(6), [5, 4, 3, 2, 1, 0]

    def write(name: str, content: dict[str, object]) -> str:
        data = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    def write_all(files: list[list[str]]) -> list[list[str]]:
        rows = images.flatten(1).numpy()
        return [
            [name, write(name, {"data": rows[number : number + 1], labels_key: [labels[number]]})]
            for number, (name, _) in enumerate(files)
        ]

    monkeypatch.setattr(kind, "train_list", write_all(kind.train_list))
    monkeypatch.setattr(kind, "test_list", write_all(kind.test_list))
    meta = dict(kind.meta)
    meta["md5"] = write(meta["filename"], {meta["key"]: [f"class {n}" for n in range(10)]})
    monkeypatch.setattr(kind, "meta", meta)
    return images, labels


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "labels_key", "files"),
    [
        ("cifar10", datasets.CIFAR10, "labels", 5),
        ("cifar100", datasets.CIFAR100, "fine_labels", 1),
    ],
)
def test_torchvision_pickles_round_trip(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inside: bool,
    name: str,
    kind: type,
    labels_key: str,
    files: int,
) -> None:
    images, labels = write_pickles(tmp_path, kind, labels_key, monkeypatch)
    root = tmp_path / kind.base_folder if inside else tmp_path
    arrays = load_arrays(name, root)
    assert torch.equal(arrays.images, images[:files])
    assert arrays.labels.tolist() == labels[:files]
    assert arrays.classes[1] == "class 1"
    assert len(load_arrays(name, root, train=False)) == 1


def test_faulty_pickles_are_named_and_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pickles(tmp_path, datasets.CIFAR10, "labels", monkeypatch)
    folder = tmp_path / "cifar-10-batches-py"
    (folder / "data_batch_2").unlink()
    changed = folder / "data_batch_3"
    changed.write_bytes(changed.read_bytes()[:-1])
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(AnywidthError, match="data_batch_3"):
        load_arrays("cifar10", tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match="--data-dir"):
        load_arrays("cifar10")
    with pytest.raises(AnywidthError, match="nowhere"):
        load_arrays("cifar100", tmp_path / "nowhere")
    for layout, name in ((CIFAR10, "cifar10"), (CIFAR100, "cifar100")):
        with pytest.raises(AnywidthError, match="--data-dir") as raised:
            load_arrays(name, tmp_path)
        for looked_for in (*layout.train_files, layout.folder, layout.pickle_folder):
            assert looked_for in str(raised.value)
    with pytest.raises(AnywidthError, match="'cifar11'"):
        load_arrays("cifar11")


def test_arrays_of_other_types_are_refused() -> None:
    with pytest.raises(AnywidthError, match="float32"):
        ImageArrays(torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.int64), ("a",))
    with pytest.raises(AnywidthError, match=r"\(3,\)"):
        ImageArrays(
            torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), ("a",)
        )


def test_other_images_labels_and_orders_have_other_digests() -> None:
    images, labels = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2), torch.arange(6) // 3
    turned = ImageArrays(images.flip(0), labels, ("a", "b"))
    relabelled = ImageArrays(images, labels.flip(0), ("a", "b"))
    found = {one.digest() for one in (ImageArrays(images, labels, ("a", "b")), turned, relabelled)}
    assert len(found) == 3
    assert turned.digest() == ImageArrays(images.flip(0), labels, ("a", "b")).digest()
