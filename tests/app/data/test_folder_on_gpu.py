"""Image folders on a GPU: the same images as on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from anywidth.app.data import decoding_on_gpu
from anywidth.app.data.decoding_on_gpu import jpeg_batches
from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.image_files import ImageFiles, scan_split
from anywidth.errors import AnywidthError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

Batches = list[tuple[Tensor, Tensor]]
COUNT = 96


@pytest.mark.parametrize("augmentation", [None, FolderAugmentation(lighting=0.1)])
def test_a_gpu_augments_as_a_cpu_does(
    image_folder: Path, augmentation: FolderAugmentation | None
) -> None:
    files = scan_split(image_folder, "train")
    options = {"batch_size": 5, "size": 16, "resize": 20, "workers": 1, "shuffle": True}
    on_cpu, on_gpu = (
        FolderLoader(files, augmentation=augmentation, device=device, **options).epoch(2)
        for device in ("cpu", "cuda")
    )
    for (images, labels), (others, other_labels) in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(labels, other_labels.cpu())
        torch.testing.assert_close(others.cpu(), images, rtol=0, atol=1e-4)


# ---- decoded by the GPU --------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFiles:
    """Smooth pictures of several sizes, as JPEG files of three kinds; decoding is switched on."""
    monkeypatch.setattr(decoding_on_gpu, "DECODES_ON_GPU", True)
    obstacle = decoding_on_gpu.obstacle(torch.device("cuda"))
    if obstacle:
        pytest.skip(obstacle)
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    kinds = ({}, {"progressive": True}, {"subsampling": 0})
    for number in range(COUNT):
        coarse = torch.rand(1, 3, 5, 6)
        size = (150 + 7 * (number % 11), 200 + 5 * (number % 13))
        smooth = interpolate(coarse, size, mode="bicubic")[0].clamp(0, 1)
        picture = Image.fromarray((255 * smooth).byte().permute(1, 2, 0).numpy())
        picture = picture.convert("L") if number % 8 == 7 else picture
        picture.save(folder / f"{number:03}.jpg", quality=95, **kinds[number % 3])
    return scan_split(tmp_path, "train")


def make(files: ImageFiles, device: str = "cuda", **options: object) -> FolderLoader:
    usual = {
        "augmentation": FolderAugmentation(jitter=0.0),
        "batch_size": 32,
        "size": 64,
        "resize": 73,
        "mean": (0.0,) * 3,
        "std": (1 / 255,) * 3,
        "workers": 2,
        "shuffle": True,
        "drop_last": True,
    }
    return FolderLoader(files, device=device, **{**usual, **options})


def kept(batches: Iterator[tuple[Tensor, Tensor]]) -> Batches:
    return [(images.cpu(), labels.cpu()) for images, labels in batches]


def test_a_gpu_decodes_as_a_cpu_does(photos: ImageFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to what decoders may do differently: rounding, and how they enlarge the colours."""
    decoded: list[Tensor] = []
    decode = jpeg_batches.decode_jpegs

    def watched(files: list[Tensor], device: torch.device) -> list[Tensor]:
        decoded.extend(files)
        return decode(files, device)

    monkeypatch.setattr(jpeg_batches, "decode_jpegs", watched)
    found, expected = (kept(make(photos, device).epoch(1)) for device in ("cuda", "cpu"))
    assert len(decoded) == COUNT
    for (images, _), (others, _) in zip(found, expected, strict=True):
        difference = (images - others).abs()
        assert float(difference.mean()) < 1
        assert float(difference.max()) < 12


def test_an_epoch_is_the_same_each_time_beside_busy_streams(photos: ImageFiles) -> None:
    loader = make(photos, positions=torch.arange(COUNT).repeat(8))
    quiet = kept(loader.epoch(3))
    matrix = torch.randn(4096, 4096, device="cuda")
    busy: Batches = []
    for images, labels in loader.epoch(3):
        # The host is far ahead of the device, and memory is freed and taken again all the time.
        for _ in range(20):
            matrix = (matrix @ matrix).div_(matrix.abs().amax() + 1)
        busy.append((images.clone(), labels.clone()))
        del images, labels
    for (images, labels), (others, other_labels) in zip(quiet, kept(iter(busy)), strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_graphs_are_captured_while_images_are_decoded(photos: ImageFiles) -> None:
    loader = make(photos, positions=torch.arange(COUNT).repeat(8))
    quiet = kept(loader.epoch(2))
    stream, weight = torch.cuda.Stream(), torch.randn(512, 512, device="cuda")
    with torch.cuda.stream(stream):
        torch.tanh(weight @ weight)  # what the first product prepares cannot be captured
    held: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    found: Batches = []
    for images, labels in loader.epoch(2):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            result = weight
            for _ in range(200):
                result = torch.tanh(result @ weight)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        held.append((graph, result))
        found.append((images.cpu(), labels.cpu()))
    for graph, _ in held:
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, held[0][1]) for _, result in held)
    for (images, _), (others, _) in zip(quiet, found, strict=True):
        assert torch.equal(images, others)


@pytest.mark.parametrize("skips", [False, True])
def test_a_damaged_file_is_named(photos: ImageFiles, skips: bool) -> None:
    path = photos.path(40)
    data = bytearray(path.read_bytes())
    place = data.index(b"\xff\xc4") + 5
    data[place : place + 16] = b"\xff" * 16  # no decoder can build this Huffman table
    path.write_bytes(data)
    loader = make(photos, skip_corrupt=skips)
    if skips:
        assert sum(len(images) for images, _ in loader.epoch(0)) == COUNT - 1
        assert set(loader.corrupt) == {str(path)}
    else:
        with pytest.raises(AnywidthError, match=path.name):
            list(loader.epoch(0))
    path.unlink()
    loader = make(photos)
    with pytest.raises(AnywidthError, match="cannot be read"):
        list(loader.epoch(0))


def test_an_epoch_may_be_left(photos: ImageFiles) -> None:
    loader = make(photos, positions=torch.arange(COUNT).repeat(8))
    whole = kept(loader.epoch(1))
    for _ in range(3):
        next(loader.epoch(0))
    for (images, _), (others, _) in zip(kept(loader.epoch(1, 5)), whole[5:], strict=True):
        assert torch.equal(images, others)
