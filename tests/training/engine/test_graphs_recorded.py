"""The graph engine's bookkeeping against the eager engine, on passes recorded on a CPU."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from recorded_passes import RecordedPasses
from recorded_training import Trainer, assert_alike, both
from tiny_networks import converted, images_and_labels, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anywidth as aw
from anywidth.training.engine.capture import _let_go
from anywidth.training.engine.graphs import GraphEngine

# Operations whose result the host must wait for on a GPU.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}


@pytest.mark.parametrize("distill", [True, False])
def test_replayed_steps_are_those_of_the_eager_engine(distill: bool) -> None:
    eager, graphs = both(distill=distill)
    assert graphs.train(20) == pytest.approx(eager.train(20), rel=1e-9)
    assert_alike(eager, graphs)
    assert graphs.passes.count == len(graphs.step.engine.captured) < 20


def test_widths_warmed_up_and_replayed_count_as_calibrated() -> None:
    eager, graphs = both()
    before = graphs.state()
    graphs.warm_up()
    assert graphs.passes.count == 4
    assert all(torch.equal(before[name], value) for name, value in graphs.state().items())
    images, _ = images_and_labels(4)
    assert aw.calibrated_widths(graphs.model) == [1.0]
    graphs.train(3)
    eager.train(3)
    assert graphs.passes.count == 4
    assert_alike(eager, graphs)
    for trainer in (eager, graphs):
        trainer.model.eval()
        with aw.at_width(trainer.model, 0.25):
            trainer.model(images.double())


def test_a_width_calibrated_after_its_capture_is_tracked_from_then_on() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        trainer.train(6)
        aw.calibrate(trainer.model, [images_and_labels(32)[0].double()], [0.5, 0.75])
        trainer.train(6)
    assert_alike(eager, graphs)


def test_few_graphs_are_kept_and_the_others_captured_again() -> None:
    eager, graphs = both(most_graphs=2)
    assert graphs.train(8) == pytest.approx(eager.train(8), rel=1e-9)
    assert len(graphs.step.engine.captured) == 2
    assert_alike(eager, graphs)


def test_parameters_that_moved_are_followed() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        trainer.train(4)
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.clone()
        trainer.train(4)
    assert_alike(eager, graphs)


def test_layers_may_be_frozen_and_released_in_between() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        first = next(trainer.model.parameters())
        first.requires_grad_(False)
        trainer.train(4)
        first.requires_grad_(True)
        trainer.train(4)
        first.requires_grad_(False)
        trainer.train(4)
    assert_alike(eager, graphs)


class Louder(nn.Module):
    """Does something else in training, as dropout does, but nothing random."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def test_modes_may_change_in_between() -> None:
    eager, graphs = both(network=lambda: nn.Sequential(*tiny(), Louder()))
    for trainer in (eager, graphs):
        trainer.train(4)
        trainer.model.get_submodule("10").eval()
        trainer.train(4)
    assert_alike(eager, graphs)


def test_a_shorter_last_batch_costs_no_graph() -> None:
    eager, graphs = both()
    graphs.warm_up()
    for trainer in (eager, graphs):
        for _ in range(3):
            trainer.train(3)
            trainer.train(1, batch=5)
    assert graphs.passes.count == 4
    assert_alike(eager, graphs)


def test_batches_of_another_size_are_captured_once_they_stay() -> None:
    eager, graphs = both()
    for trainer in (eager, graphs):
        trainer.train(3)
        trainer.train(6, batch=8)
    assert graphs.step.engine.batch[0].shape[0] == 8
    assert_alike(eager, graphs)


def test_parameters_that_take_no_part_are_left_alone() -> None:
    """Weight decay would shrink them if their gradient were zeros."""

    class WithSpare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = tiny(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, graphs = both(network=WithSpare)
    before = graphs.model.spare.weight.clone()
    for trainer in (eager, graphs):
        trainer.train(5)
    assert_alike(eager, graphs)
    assert torch.equal(graphs.model.spare.weight, before)


def test_a_loss_with_parameters_learns() -> None:
    """The optimiser holds them; the network does not."""
    learned = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        model = converted().double()
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)

        def loss(output: Tensor, labels: Tensor, scale: nn.Parameter = scale) -> Tensor:
            return F.cross_entropy(scale * output, labels)

        step = aw.SandwichStep(model, optimizer, loss, aw.soft_cross_entropy)
        if is_recorded:
            passes = RecordedPasses()
            step.engine = GraphEngine(model, step.parameters, step.engine.objective, 512, passes)
        for number in range(4):
            images, labels = images_and_labels(16, seed=number)
            step(images.double(), labels)
        learned.append(scale.item())
    assert learned[0] != 1.0
    assert learned[1] == pytest.approx(learned[0])


def test_without_captures_training_goes_on_after_one_warning() -> None:
    eager, graphs = both(refuses=True)
    with pytest.warns(UserWarning, match="refused") as seen:
        found = graphs.train(5)
    assert len(seen) == 1
    assert found == pytest.approx(eager.train(5), rel=1e-9)
    assert_alike(eager, graphs)


def test_a_pass_that_failed_keeps_none_of_its_tensors() -> None:
    """They would hold the nodes that add up gradients on the stream of the failed capture."""
    seen: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        hidden = torch.zeros(1)
        seen.append(weakref.ref(hidden))
        raise RuntimeError("reads a value\nof the GPU")

    def captured() -> None:
        output = torch.zeros(1)
        seen.append(weakref.ref(output))
        try:
            forward()
        finally:
            raise RuntimeError("the capture ended badly")

    with pytest.raises(RuntimeError) as caught:
        captured()
    assert None not in [ref() for ref in seen]
    assert _let_go(caught.value) == "RuntimeError: reads a value"
    assert [ref() for ref in seen] == [None, None]


class Waiting(TorchDispatchMode):
    """The operations that would make a host wait for its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        to_host = name == "_to_copy" and str((kwargs or {}).get("device")) == "cpu"
        if name in WAITS or to_host:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_no_step_waits_for_the_device(is_recorded: bool) -> None:
    """First sights included; that a value is read after all is noticed."""
    trainer = Trainer(is_recorded)
    batches = [images_and_labels(16, seed=seed) for seed in range(4)]
    batches = [(images.double(), labels) for images, labels in batches]
    with Waiting() as waiting:
        results = [trainer.step(*batch) for batch in batches]
        assert waiting.found == []
        float(results[0].losses[0])
    assert waiting.found == ["_local_scalar_dense"]
