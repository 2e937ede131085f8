"""What each of two processes does in `test_distributed.py`: torchrun two_ranks.py OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels, without_norms
from torch import nn

import anywidth as aw
from anywidth import distributed
from anywidth.statistics import statistics_to_tensors

STEPS = 4
BATCH = 16
WIDTHS = (0.25, 0.5, 0.75, 1.0)


def train(rank: int, world_size: int) -> tuple[nn.Module, list[aw.ChannelConfig]]:
    """A few steps on this rank's part of each batch."""
    torch.manual_seed(0)
    model = converted(without_norms())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, seed=7)
    part = slice(BATCH * rank // world_size, BATCH * (rank + 1) // world_size)
    widths = []
    for number in range(STEPS):
        images, labels = images_and_labels(BATCH, seed=number)
        widths += step(images[part], labels[part]).widths
    return model, widths


def calibrate() -> nn.Module:
    torch.manual_seed(0)
    model = converted()
    images, _ = images_and_labels(48)
    aw.calibrate(model, images.split(16), WIDTHS)
    return model


def main(folder: Path) -> None:
    distributed.start_processes(torch.device("cpu"))
    rank = distributed.rank()
    reductions = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        reductions.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    model, widths = train(rank, distributed.world_size())
    dist.all_reduce = all_reduce
    calibrated = calibrate()
    # Running statistics differ by rank until they are averaged.
    tracked = converted()
    tracked[1].running_mean.fill_(float(rank))  # type: ignore[index]
    distributed.average_statistics(tracked)
    torch.save(
        {
            "weights": model.state_dict(),
            "widths": widths,
            "reductions": reductions,
            "full": calibrated.state_dict(),
            "bank": statistics_to_tensors(calibrated)[0],
            "averaged": tracked[1].running_mean.clone(),  # type: ignore[index]
            "sum": distributed.sum_over_ranks(torch.tensor([1.0, rank])),
        },
        folder / f"rank{rank}.pt",
    )
    distributed.stop_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
