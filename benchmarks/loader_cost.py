"""The processor time per image of a folder of photos: in workers and in the training process."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from anywidth.app.data.augment import normalize
from anywidth.app.data.folder import IMAGENET_MEAN, IMAGENET_STD, FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.image_files import scan_folder

SIZE = 224
ROUNDS = 3

Batches = Iterable[tuple[Tensor, Tensor]]


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
    kinds = {
        "torchvision's transforms in workers": usual_epochs(folder, device, batch, workers),
        "anywidth's folder loader": folder_epochs(folder, device, batch, workers),
        "anywidth's folder loader, validation": folder_epochs(
            folder, device, batch, workers, is_training=False
        ),
    }
    torch.set_num_threads(1)  # as in a worker, so that both are counted alike
    own = {name: _workers_of(epoch) for name, epoch in kinds.items()}
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
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = _processor_seconds(workers) - begun
    return spent / images, (time.process_time() - own) / images


def _processor_seconds(processes: list[int]) -> float:
    """User and system time, from Linux's /proc."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
