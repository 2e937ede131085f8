"""Can the data loader keep up with the training step? Images per second of both, in one run.

    python3 -m benchmarks.loader --workers 16 --out benchmarks/results/loader.json

At 32 px the data set is on the device: the time to crop, augment and normalise a batch is compared
with the step. For image folders, the script makes JPEG files of ImageNet's usual size (500 x 375
px) and times the loader, the step, and both together. It also counts the processor time per image
of the workers and of the training process, beside those of torchvision's transforms in workers;
`--only-cost` counts nothing else, and needs no GPU. `--decode-on-gpu` times image folders alone,
decoded by the workers and by the GPU:

    python3 -m benchmarks.loader --decode-on-gpu --workers 16
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import anywidth as aw
from anywidth.app.data import decoding_on_gpu, image_reading
from anywidth.app.data.arrays import ImageArrays
from anywidth.app.data.augment import Augmentation, normalize
from anywidth.app.data.folder import IMAGENET_MEAN, IMAGENET_STD, FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.image_files import scan_folder
from anywidth.app.data.loader import DeviceLoader
from anywidth.app.model_spec import load_model
from benchmarks.records import circumstances, wait, write_record

WIDTHS = (1.0, 0.25, 0.475, 0.725)
SIZE = 224
ROUNDS = 3

Batches = Iterable[tuple[Tensor, Tensor]]


def make_step(pixels: int, device: torch.device, **options: Any) -> aw.SandwichStep:
    torch.manual_seed(0)
    model = load_model("mobilenet_v1", num_classes=1000, **options)
    aw.slimmable(model, example_input=torch.randn(2, 3, pixels, pixels), verified=False)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=device.type == "cuda"
    )
    sampling = aw.Sampling("fixed", widths=WIDTHS)
    return aw.SandwichStep(model, optimizer, F.cross_entropy, widths=sampling, autocast="auto")


def ignore(images: Tensor, labels: Tensor) -> None:
    """Load a batch and do nothing with it."""


def batches_a_second(
    batches: Batches,
    use: Callable[[Tensor, Tensor], Any],
    device: torch.device,
    skip: int,
    count: int,
) -> float:
    """Batches per second that are made and used, after the first `skip`."""
    started = 0.0
    for number, (images, labels) in enumerate(batches):
        if number == skip:
            wait(device)
            started = time.perf_counter()
        use(images, labels)
        if number == skip + count - 1:
            break
    else:
        raise SystemExit(f"only {number + 1} batches: {skip + count} are needed")
    wait(device)
    return count / (time.perf_counter() - started)


def on_the_device(device: torch.device, batch: int, count: int) -> list[dict[str, Any]]:
    """32 px: the loader's time relative to a step."""
    images = torch.randint(0, 256, (20 * batch, 3, 32, 32), dtype=torch.uint8)
    arrays = ImageArrays(images, torch.randint(0, 10, (len(images),)), tuple("0123456789"))
    loader = DeviceLoader(
        arrays,
        batch_size=batch,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        augmentation=Augmentation(cutout=8),
        shuffle=True,
        drop_last=True,
        device=device,
    )

    def repeated() -> Batches:
        for epoch in range(10**6):
            yield from loader.epoch(epoch)

    fixed = [next(iter(loader.epoch(0)))] * (count + 8)
    rows = []
    for name, options in (("mobilenet_v1", {}), ("mobilenet_v1+cifar", {"total_stride": 8})):
        step = make_step(32, device, **options)
        rates: dict[str, list[float]] = {"loader": [], "step": [], "both": []}
        for _ in range(ROUNDS):
            rates["loader"].append(batches_a_second(repeated(), ignore, device, 8, count))
            rates["step"].append(batches_a_second(fixed, step, device, 8, count))
            rates["both"].append(batches_a_second(repeated(), step, device, 8, count))
        ms = {name: 1e3 / statistics.median(values) for name, values in rates.items()}
        rows.append(
            {
                "input": f"{name}, 32 px on the device",
                "batch": batch,
                **{f"{key} ms": value for key, value in ms.items()},
                "share of the step": ms["loader"] / ms["step"],
                "training slows by": ms["both"] / ms["step"] - 1,
            }
        )
    return rows


def write_pictures(folder: Path, count: int, width: int = 500) -> float:
    """Write JPEG files, by default of ImageNet's usual size; return their mean size in kB."""
    generator = torch.Generator().manual_seed(0)
    sizes, shape = [], (width * 3 // 4, width)
    for number in range(count):
        coarse = torch.rand((1, 3, 47, 63), generator=generator)
        fine = 0.12 * torch.rand((1, 3, *shape), generator=generator)
        smooth = F.interpolate(coarse, shape, mode="bicubic").clamp(0, 1)
        pixels = (255 * (0.88 * smooth + fine)).clamp(0, 255).byte()[0].permute(1, 2, 0)
        data = io.BytesIO()
        Image.fromarray(pixels.numpy()).save(data, "JPEG", quality=90)
        path = folder / f"class{number % 10}"
        path.mkdir(exist_ok=True)
        (path / f"{number}.jpg").write_bytes(data.getvalue())
        sizes.append(len(data.getvalue()) / 1e3)
    return statistics.mean(sizes)


def decoded_both_ways(
    device: torch.device, batch: int, count: int, workers: int, pictures: int
) -> list[dict[str, Any]]:
    """224 px: files decoded by the GPU, then by worker processes."""
    rows = []
    for by_gpu in (True, False):
        with patch.object(decoding_on_gpu, "DECODES_ON_GPU", by_gpu):
            obstacle = decoding_on_gpu.obstacle(device)
            if by_gpu and obstacle:
                raise SystemExit(f"the GPU cannot decode: {obstacle}")
            row = from_a_folder(device, batch, count, workers, pictures)
        rows.append({**row, "decoded by": "the GPU" if by_gpu else "workers"})
    return rows


def from_a_folder(
    device: torch.device, batch: int, count: int, workers: int, pictures: int
) -> dict[str, Any]:
    """224 px: files decoded by worker processes, or by the GPU if that is switched on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_pictures(folder, pictures)
        # Batches that were decoded in advance would seem to take no time.
        ahead = 2 * workers + 4
        epochs = -(-batch * (ahead + count) // pictures)
        loader = FolderLoader(
            scan_folder(folder),
            positions=torch.arange(pictures).repeat(epochs),
            batch_size=batch,
            augmentation=FolderAugmentation(),
            shuffle=True,
            drop_last=True,
            device=device,
            workers=workers,
        )
        step = make_step(224, device)
        fixed = [next(iter(loader.epoch(0)))] * (count + 8)
        alone = batches_a_second(loader.epoch(1), ignore, device, ahead, count)
        consumed = batches_a_second(fixed, step, device, 8, count)
        both = batches_a_second(loader.epoch(2), step, device, ahead, count)
    return {
        "input": f"mobilenet_v1, 224 px, JPEG of {size:.0f} kB, {workers} workers",
        "batch": batch,
        "loader images/s": batch * alone,
        "step images/s": batch * consumed,
        "both images/s": batch * both,
        "bottleneck": "loader" if alone < consumed else "step",
    }


# ---- processor time ------------------------------------------------------------------------------


def usual_epochs(
    folder: Path, device: torch.device, batch: int, workers: int
) -> Callable[[int], Batches]:
    """The same augmentation as most programs do it: all of it per image, in the workers."""
    images = ImageFolder(
        str(folder),
        transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE, scale=(0.25, 1.0)),
                transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
                transforms.RandomHorizontalFlip(),
                transforms.PILToTensor(),
            ]
        ),
    )
    loader: DataLoader[Any] = DataLoader(
        images,
        batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    mean, std = (torch.tensor(x, device=device) for x in (IMAGENET_MEAN, IMAGENET_STD))

    def epoch(number: int) -> Batches:
        for pixels, labels in loader:
            yield normalize(pixels.to(device, non_blocking=True), mean, std), labels.to(device)

    return epoch


def folder_epochs(
    folder: Path, device: torch.device, batch: int, workers: int, *, is_training: bool = True
) -> Callable[[int], Batches]:
    """Epochs of anywidth's loader."""
    return FolderLoader(
        scan_folder(folder),
        batch_size=batch,
        size=SIZE,
        augmentation=FolderAugmentation() if is_training else None,
        shuffle=True,
        device=device,
        workers=workers,
    ).epoch


def cost_rows(folder: Path, device: torch.device, batch: int, workers: int) -> list[dict[str, Any]]:
    """The cost of both loaders, and of validation; rounds take turns."""
    pillow = "anywidth's folder loader, Pillow alone"
    kinds = {
        "torchvision's transforms in workers": usual_epochs(folder, device, batch, workers),
        pillow: folder_epochs(folder, device, batch, workers),
        "anywidth's folder loader, simplejpeg": folder_epochs(folder, device, batch, workers),
        "anywidth's folder loader, validation": folder_epochs(
            folder, device, batch, workers, is_training=False
        ),
    }
    torch.set_num_threads(1)  # as in a worker, so that both are counted alike
    if image_reading.simplejpeg is None:
        raise SystemExit("the cost is compared with that of simplejpeg, which is not installed")
    own = {}
    for name, epoch in kinds.items():
        # Workers are forked with what is imported then.
        with patch.object(image_reading, "simplejpeg", None) if name == pillow else nullcontext():
            own[name] = _workers_of(epoch)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(ROUNDS):
        for name, epoch in kinds.items():
            found[name].append(_cost(epoch(number + 1), own[name], device))
    rows = []
    for name, costs in found.items():
        worker, training = (statistics.median(column) for column in zip(*costs, strict=True))
        rows.append(
            {
                "input": f"{name}, {SIZE} px, {workers} workers",
                "batch": batch,
                "worker CPU ms per image": 1e3 * worker,
                "training process CPU ms per image": 1e3 * training,
            }
        )
    usual = rows[0]["worker CPU ms per image"]
    for row in rows:
        row["workers relative to torchvision's"] = row["worker CPU ms per image"] / usual
    return rows


def _workers_of(epoch: Callable[[int], Batches]) -> list[int]:
    """The processes that start when an epoch is read; it also warms them up."""
    before = {process.pid for process in multiprocessing.active_children()}
    for _ in epoch(0):
        pass
    return [
        process.pid
        for process in multiprocessing.active_children()
        if process.pid is not None and process.pid not in before
    ]


def _cost(batches: Batches, workers: list[int], device: torch.device) -> tuple[float, float]:
    """Processor seconds per image of the workers, and of this process."""
    begun, own, images = _processor_seconds(workers), time.process_time(), 0
    for pixels, _ in batches:
        images += len(pixels)
    wait(device)
    spent = _processor_seconds(workers) - begun
    return spent / images, (time.process_time() - own) / images


def _processor_seconds(processes: list[int]) -> float:
    """User and system time, from Linux's /proc."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pictures", type=int, default=2048, help="JPEG files made for the test")
    parser.add_argument("--batches", type=int, default=40, help="batches timed")
    parser.add_argument("--small-batch", type=int, default=512, help="batch size at 32 px")
    parser.add_argument("--large-batch", type=int, default=256, help="batch size at 224 px")
    parser.add_argument(
        "--only-cost", action="store_true", help="count processor time only, with one worker"
    )
    parser.add_argument(
        "--photo-width", type=int, default=500, help="px, of the photos that time is counted for"
    )
    parser.add_argument(
        "--decode-on-gpu", action="store_true", help="time folders only, decoded in both ways"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    sizes = arguments.large_batch, arguments.batches, arguments.workers, arguments.pictures
    if arguments.decode_on_gpu:
        rows += decoded_both_ways(device, *sizes)
    elif not arguments.only_cost:
        rows += on_the_device(device, arguments.small_batch, arguments.batches)
        rows.append(from_a_folder(device, *sizes))
    if not arguments.decode_on_gpu:
        with tempfile.TemporaryDirectory() as name:
            write_pictures(Path(name), arguments.pictures, arguments.photo_width)
            workers = 1 if arguments.only_cost else arguments.workers
            rows += cost_rows(Path(name), device, arguments.large_batch, workers)
    for row in rows:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    record = {**circumstances(device), "cores": os.cpu_count(), "rows": rows}
    write_record(arguments.out, record)


if __name__ == "__main__":
    main()
