"""Two processes that train one network by FSDP2 and without: torchrun sharded_ranks.py."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import BATCH, everything

import anywidth as aw


def train(rank: int, sharded: bool) -> dict[str, torch.Tensor]:
    """Steps on this rank's part of a batch, by FSDP2 or without; the whole tensors afterwards."""
    torch.manual_seed(0)
    model = converted()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[4], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
        for refused in (lambda: aw.extract(model, 0.5), lambda: aw.save(model, "unused")):
            with pytest.raises(aw.AnywidthError, match="FSDP"):
                refused()
    step = aw.SandwichStep(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    for number in range(3):
        images, labels = images_and_labels(BATCH, seed=number)
        step(images[rank::2], labels[rank::2])
    aw.calibrate(model, [images_and_labels(16)[0]], [0.5])
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in everything(model).items()
    }


def main() -> None:
    dist.init_process_group("gloo")
    whole, sharded = (train(dist.get_rank(), sharded) for sharded in (False, True))
    assert sharded.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, msg=name)
    dist.barrier()
    dist.destroy_process_group()
    # FSDP's device mesh keeps gloo's threads, which sometimes abort while Python exits.
    os._exit(0)


if __name__ == "__main__":
    main()
