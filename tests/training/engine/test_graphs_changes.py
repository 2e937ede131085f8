"""What a replay cannot notice by itself: the graph engine must end where the eager engine ends."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded_training import Trainer, assert_alike, both
from tiny_networks import images_and_labels, tiny
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming.layers import dress
from anywidth.slimming.norm_statistics import Affine, norm_records
from anywidth.slimming.switchable import add_private_affine


def _norms(trainer: Trainer) -> list[nn.BatchNorm2d]:
    return [module for module in trainer.model.modules() if isinstance(module, nn.BatchNorm2d)]


class Assigns(nn.Module):
    """Replaces a buffer in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.compiler.is_exporting():
            self.level = 0.5 * self.level + 0.5 * x.detach().mean()
        return x + self.level


def test_a_buffer_that_forward_assigns_is_not_captured() -> None:
    eager, graphs = both(network=lambda: nn.Sequential(Assigns(), tiny()))
    with pytest.warns(UserWarning, match=r"'0\.level'") as seen:
        found = graphs.train(4)
    assert len(seen) == 1
    assert found == pytest.approx(eager.train(4), rel=1e-9)
    assert_alike(eager, graphs)


def test_buffers_that_were_replaced_are_followed() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        trainer.train(3)
        for norm in _norms(trainer):
            norm.running_mean = torch.zeros_like(norm.running_mean)
        trainer.train(3)
    assert_alike(eager, graphs)


def test_hooks_of_layers_may_come_and_go() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        trainer.train(3)
        hook = trainer.model.get_submodule("0").register_forward_hook(lambda *call: 1.5 * call[-1])
        trainer.train(3)
        hook.remove()
        trainer.train(3)
    assert_alike(eager, graphs)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_run_at_each_width(kind: str) -> None:
    calls = []
    for trainer in both():
        called: list[object] = []
        calls.append(called)
        for parameter in trainer.model.parameters():
            getattr(parameter, kind)(lambda given, called=called: called.append(given))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.train(2)
        assert len(seen) == len(calls) - 1  # the graph engine says that it is not used
    assert len(calls[0]) == len(calls[1]) > 0


def test_scales_of_switches_that_a_step_leaves_out_are_left_alone() -> None:
    """An earlier step used them. Momentum and weight decay act on a gradient of zero."""
    eager, graphs = both(
        prepare=lambda model: add_private_affine(model, [0.25, 0.5, 0.75]),
        distill=False,
        widths=aw.Sampling("random", count=2, lattice=4),
    )
    for trainer in (eager, graphs):
        trainer.train(8)
    assert_alike(eager, graphs)


def test_frozen_norms_follow_scales_tuned_later() -> None:
    eager, graphs = both(
        prepare=lambda model: aw.calibrate(
            model, [images_and_labels(32)[0].double()], [0.25, 0.5, 0.75]
        ),
        widths=aw.Sampling("fixed", widths=(1.0, 0.25, 0.5, 0.75)),
    )
    for trainer in (eager, graphs):
        trainer.model.train()
        for norm in _norms(trainer):
            norm.eval()
        trainer.train(2)
        for scale in (2.0, 3.0):
            for norm, record in norm_records(trainer.model).items():
                record.has_tuned = True
                dress(norm)
                for entry in record.bank.values():
                    size = entry.running_mean
                    entry.affine = Affine(torch.full_like(size, scale), torch.ones_like(size))
            trainer.train(2)
    assert_alike(eager, graphs)
    entries = [e for record in norm_records(graphs.model).values() for e in record.bank.values()]
    assert all(entry.affine is not None for entry in entries)


def test_losses_of_one_value_with_an_axis_are_captured() -> None:
    eager, graphs = both(loss=lambda output, labels: F.cross_entropy(output, labels).view(1))
    for trainer in (eager, graphs):
        trainer.train(3)
    assert_alike(eager, graphs)


class Outputs(nn.Module):
    """A network that returns something beside its logits."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.body, self.extra = tiny(), extra

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.body(x), "extra": self.extra}


def _cross_entropy(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], labels)


def _train_with(extra: object) -> Trainer:
    eager, graphs = both(network=lambda: Outputs(extra), loss=_cross_entropy, distill=False)
    for trainer in (eager, graphs):
        trainer.train(4)
    assert_alike(eager, graphs)
    return graphs


def test_outputs_that_are_none_are_captured() -> None:
    assert _train_with(None).passes.count > 0


def test_outputs_with_numbers_are_not_captured_and_train_alike() -> None:
    with pytest.warns(UserWarning, match="float"):
        assert _train_with(0.5).passes.count == 0


def test_weights_of_widths_are_exact_in_float64() -> None:
    eager, graphs = both(weights="balanced")
    for trainer in (eager, graphs):
        trainer.train(4)
    assert_alike(eager, graphs)


def test_warming_up_leaves_gradients_that_accumulate() -> None:
    eager, graphs = both(widths=aw.Sampling("fixed", widths=(1.0, 0.25)))
    for trainer in (eager, graphs):
        for seed in range(4):
            images, labels = images_and_labels(16, seed=seed)
            trainer.step.backward(images.double(), labels)
            if seed == 1:
                trainer.warm_up()
        trainer.optimizer.step()
    assert_alike(eager, graphs)


def test_replays_count_as_training_for_the_age_of_statistics() -> None:
    """Widths that training has not visited for long need new statistics."""
    outdated = []
    for trainer in both():
        trainer.train(2)
        aw.set_width(trainer.model, 1.0)
        norm = _norms(trainer)[0]
        before = norm.num_batches_tracked._version
        trainer.train(3)
        outdated.append(norm.num_batches_tracked._version - before)
    assert outdated[0] == 3
    assert outdated[1] >= 3


def test_unused_memory_is_freed_before_the_first_capture_and_where_none_is_left() -> None:
    """Freeing it waits for the device, and later captures use the memory of the first."""
    eager, graphs = both(widths=aw.Sampling("fixed", widths=(1.0, 0.25, 0.5)))
    eager.train(3)
    graphs.train(3)
    assert (graphs.passes.count, graphs.passes.freed) == (3, 1)
    graphs.passes.is_short = True
    graphs.warm_up()
    assert (graphs.passes.count, graphs.passes.freed) == (4, 2)
    assert_alike(eager, graphs)
    graphs.passes.refuses = True
    first = next(graphs.model.parameters())
    first.data = first.data.clone()  # all are captured again
    with pytest.warns(UserWarning, match="refused"):
        graphs.train(1)
    eager.train(1)
    assert_alike(eager, graphs)
