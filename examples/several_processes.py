"""Train for all widths in several processes, each with its part of the data.

torchrun --nproc-per-node 2 examples/several_processes.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bundled_images import images, show_errors, slimmable_network
from torch.utils.data import DataLoader, DistributedSampler

import anywidth as aw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = slimmable_network()
    data = images(train=True, count=options.images)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Not in DistributedDataParallel: all ranks draw the same widths, and gradients are averaged
    # once per step.
    step = aw.SandwichStep(model, optimizer, F.cross_entropy)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, labels in DataLoader(data, batch_size=25, sampler=sampler):
            step(batch, labels)
    if dist.get_rank() == 0:
        show_errors(model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
