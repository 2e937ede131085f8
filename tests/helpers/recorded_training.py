"""A tiny network trained by either engine; the graph engine's passes are recorded on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from recorded_passes import RecordedPasses
from tiny_networks import converted, images_and_labels, tiny
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.norm_statistics import tracked_statistics
from anywidth.training.engine.graphs import GraphEngine

WIDTHS = [1.0, 0.25, 0.5, 0.75]


class Trainer:
    """A tiny network and its step, by either engine; `passes` counts what was captured."""

    def __init__(
        self,
        is_recorded: bool,
        network: Callable[[], nn.Module] = tiny,
        most_graphs: int = 512,
        refuses: bool = False,
        distill: bool = True,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        prepare: Callable[[nn.Module], object] = lambda model: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = converted(network()).double()
        prepare(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        self.step = aw.SandwichStep(
            self.model,
            self.optimizer,
            loss,
            aw.soft_cross_entropy if distill else None,
            autocast=None,
            **options,
        )
        self.passes = RecordedPasses(refuses)
        if is_recorded:
            self.step.engine = GraphEngine(
                self.model,
                self.step.parameters,
                self.step.engine.objective,
                most_graphs,
                self.passes,
            )

    def train(self, steps: int, batch: int = 16) -> list[float]:
        losses = []
        for _ in range(steps):
            images, labels = images_and_labels(batch, seed=self.step.count)
            losses += [float(loss) for loss in self.step(images.double(), labels).losses]
        return losses

    def warm_up(self) -> None:
        images, labels = images_and_labels(16, seed=99)
        self.step.warm_up(WIDTHS, images.double(), labels)

    def state(self) -> dict[str, Tensor]:
        """Weights and statistics of all widths."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, entry in enumerate(tracked_statistics(self.model)):
            state |= {f"mean {number}": entry.running_mean, f"var {number}": entry.running_var}
            state |= {f"count {number}": entry.num_batches_tracked}
        return {name: value.double() for name, value in state.items()}


def both(**options: object) -> tuple[Trainer, Trainer]:
    return Trainer(False, **options), Trainer(True, **options)  # type: ignore[arg-type]


def assert_alike(eager: Trainer, graphs: Trainer) -> None:
    expected, found = eager.state(), graphs.state()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12, msg=name)
