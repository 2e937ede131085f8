"""What each of two processes does in `test_distributed.py`: torchrun two_ranks.py OUT [cuda]."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels, tiny, without_norms
from torch import nn

import anywidth as aw
from anywidth import distributed
from anywidth.training.calibration import average_statistics
from anywidth.training.statistics_state import statistics_to_tensors

STEPS = 4
BATCH = 16
WIDTHS = (0.25, 0.5, 0.75, 1.0)


def train(
    rank: int, world_size: int, device: str = "cpu"
) -> tuple[nn.Module, list[aw.ChannelConfig]]:
    """A few steps on this rank's part of each batch; on a GPU by graphs, in float32."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    model = converted(without_norms()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, seed=7)
    part = slice(BATCH * rank // world_size, BATCH * (rank + 1) // world_size)
    widths = []
    for number in range(STEPS):
        images, labels = images_and_labels(BATCH, seed=number)
        widths += step(images[part].to(device), labels[part].to(device)).widths
    return model, widths


class Centres(nn.Module):
    """A loss that learns too: a point for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(10, 10))

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(-torch.cdist(output, self.points), labels)


def train_from_elsewhere(rank: int) -> dict[str, torch.Tensor]:
    """Ranks that begin with weights of their own, and a loss with parameters."""
    torch.manual_seed(rank)
    model, loss = converted(), Centres()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    step = aw.SandwichStep(model, optimizer, loss, aw.soft_cross_entropy)
    for number in range(2):
        step(*images_and_labels(BATCH, seed=2 * number + rank))
    return {**dict(model.named_parameters()), **dict(loss.named_parameters())}


def calibrate(group: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = converted()
    images, _ = images_and_labels(48)
    aw.calibrate(model, images.split(16), WIDTHS, process_group=group)
    return model


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = tiny(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def train_in(group: Any, rank: int, network: nn.Module | None = None) -> nn.Module:
    """Two steps from weights of this rank's own, on its own part of the data."""
    torch.manual_seed(rank)
    model = converted(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, process_group=group)
    for number in range(2):
        step(*images_and_labels(BATCH, seed=2 * number + rank))
    return model


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **statistics_to_tensors(model)[0]}


def main(folder: Path, device: str = "cpu") -> None:
    # Several ranks on one GPU are more than NCCL takes, so they meet through the CPU.
    distributed.start_processes(torch.device("cpu"))
    rank = distributed.rank()
    group = weakref.ref(dist.group.WORLD)
    reductions = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        reductions.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    model, widths = train(rank, distributed.world_size(), device)
    dist.all_reduce = all_reduce
    calibrated = calibrate("world")
    each = [dist.new_group([number]) for number in range(2)][rank]
    # Running statistics differ by rank until they are averaged.
    tracked = converted()
    tracked[1].running_mean.fill_(float(rank))  # type: ignore[index]
    average_statistics(tracked)
    torch.save(
        {
            "weights": model.cpu().state_dict(),
            "widths": widths,
            "reductions": reductions,
            "full": calibrated.state_dict(),
            "bank": statistics_to_tensors(calibrated)[0],
            "averaged": tracked[1].running_mean.clone(),  # type: ignore[index]
            "elsewhere": train_from_elsewhere(rank),
            "together": everything(train_in("world", rank)),
            "alone": everything(train_in(None, rank)),
            "of one": everything(train_in(each, rank)),
            "calibrated by one": everything(calibrate()) if rank == 0 else {},
            "unused": train_in("world", rank, WithUnused()).unused.weight.grad,  # type: ignore[union-attr]
            "sum": distributed.sum_over_ranks(torch.tensor([1.0, rank])),
        },
        folder / f"rank{rank}.pt",
    )
    distributed.stop_processes()
    (folder / f"rank{rank}.group").write_text("kept" if group() else "gone")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
