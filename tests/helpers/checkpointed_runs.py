"""Runs whose checkpoints hold what their step says."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from anywidth.app.runs import settings
from anywidth.app.runs.run import Run


@dataclass(frozen=True)
class Settings(settings.Settings):
    task: ClassVar[str] = "test"
    version: ClassVar[int] = 1
    epochs: int = 3


def tensors_at(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(8, 4, generator=generator), "steps": torch.tensor(step)},
        "optimizer": {"momentum": torch.randn(8, 4, generator=generator)},
    }


def run_with(folder: Path, *steps: int) -> Run:
    run = Run.create(folder, Settings())
    for step in steps:
        run.save_checkpoint(step, tensors_at(step), {"epoch": step // 10})
    return run


def names(run: Run) -> list[str]:
    return sorted(os.listdir(run.folder / "checkpoints"))


def assert_is_step(run: Run, step: int) -> None:
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.state == {"epoch": step // 10}
    for part, expected in tensors_at(step).items():
        assert checkpoint.tensors[part].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.tensors[part][name], tensor)
