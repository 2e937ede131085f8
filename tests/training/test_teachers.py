"""What narrower widths learn from: targets, their configuration, and other teachers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from recorded_passes import RecordedPasses
from tiny_networks import converted, images_and_labels, tiny
from torch import Tensor, nn

import anywidth as aw
from anywidth.training.distillation import extras_of
from anywidth.training.engine.graphs import GraphEngine


def step_of(model: nn.Module, by_graphs: bool = False, **options) -> aw.SandwichStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, **options)
    if by_graphs:
        passes = RecordedPasses(False)
        step.engine = GraphEngine(model, step.parameters, step.engine.objective, capture=passes)
    return step


def train(step: aw.SandwichStep, steps: int) -> None:
    for number in range(steps):
        images, labels = images_and_labels(16, number)
        step(images.double(), labels)


def trained(by_graphs: bool = False, steps: int = 4, **options) -> list[Tensor]:
    torch.manual_seed(0)
    model = converted().double()
    train(step_of(model, by_graphs, **options), steps)
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- what a distillation may see -----------------------------------------------------------------


def test_a_distillation_may_see_targets_and_its_configuration() -> None:
    seen: list[tuple[Tensor, aw.ChannelConfig]] = []

    def distill(output: Tensor, full: Tensor, *, targets: Tensor, config: aw.ChannelConfig):
        seen.append((targets, config))
        return aw.soft_cross_entropy(output, full)

    step = step_of(converted(), distill=distill)
    images, labels = images_and_labels(8)
    result = step(images, labels)
    assert [config for _, config in seen] == result.widths[1:]
    assert all(targets is labels for targets, _ in seen)


def test_both_engines_give_a_distillation_the_same() -> None:
    def distill(output: Tensor, full: Tensor, *, targets: Tensor, config: aw.ChannelConfig):
        share = config["0"] / 16
        true = F.cross_entropy(output, targets)
        return share * aw.soft_cross_entropy(output, full) + (1 - share) * true

    for eager, graphs in zip(trained(distill=distill), trained(True, distill=distill), strict=True):
        torch.testing.assert_close(graphs, eager)


def test_what_a_distillation_asks_for() -> None:
    def one(output, full, *, targets): ...

    def positional(output, full, targets): ...

    def other(output, full, *, images): ...

    class Module(nn.Module):
        def forward(self, output, full, *, config): ...

    assert extras_of(one) == ("targets",)
    assert extras_of(partial(one, targets=3)) == ()
    assert extras_of(Module()) == ("config",)
    assert extras_of(lambda output, full, *, targets=None, temperature=1.0: output) == ("targets",)
    assert extras_of(lambda output, full, config=None: output) == ("config",)
    assert extras_of(F.mse_loss) == extras_of(torch.dist) == ()
    for wrong, word in ((positional, "targets"), (other, "images")):
        with pytest.raises(aw.AnywidthError, match=word):
            step_of(converted(), distill=wrong)


# ---- other teachers ------------------------------------------------------------------------------


def test_another_network_teaches_narrower_widths_only() -> None:
    seen: list[Tensor] = []

    def distill(output: Tensor, teacher: Tensor) -> Tensor:
        seen.append(teacher)
        return aw.soft_cross_entropy(output, teacher)

    large = tiny(dropout=0.5)  # in training mode
    before = [buffer.clone() for buffer in large.buffers()]
    step = step_of(converted(), distill=distill, teacher=large)
    images, labels = images_and_labels(8)
    result = step(images, labels)
    assert large.training
    assert all(map(torch.equal, before, large.buffers()))
    expected = large.eval()(images)
    assert len(seen) == 3
    assert all(torch.equal(one, expected) and not one.requires_grad for one in seen)
    torch.testing.assert_close(result.losses[0], F.cross_entropy(result.outputs[0], labels))


@pytest.mark.parametrize("kind", ["network", "function", "ema"])
def test_both_engines_learn_from_other_teachers(kind: str) -> None:
    torch.manual_seed(1)
    large = tiny().double().eval()
    options = {
        "network": {"teacher": large},
        "function": {"teacher": lambda images: 2 * large(images)},
        "ema": {"teacher": "ema", "ema_decay": 0.9},
    }[kind]
    eager, graphs, usual = trained(**options), trained(True, **options), trained()
    for one, other in zip(eager, graphs, strict=True):
        torch.testing.assert_close(other, one)
    assert not all(map(torch.equal, eager, usual))


def test_a_pass_that_cannot_be_captured_learns_from_the_same_teacher() -> None:
    torch.manual_seed(1)
    large = tiny().double().eval()
    torch.manual_seed(0)
    model = converted().double()
    step = step_of(model, teacher=large)
    refusing = RecordedPasses(refuses=True)
    step.engine = GraphEngine(model, step.parameters, step.engine.objective, capture=refusing)
    with pytest.warns(UserWarning, match="captured"):
        train(step, 4)
    for one, other in zip(trained(teacher=large), model.parameters(), strict=True):
        torch.testing.assert_close(other.detach(), one)


def test_the_average_teaches_with_batch_statistics() -> None:
    seen: list[Tensor] = []

    def distill(output: Tensor, teacher: Tensor) -> Tensor:
        seen.append(teacher)
        return aw.soft_cross_entropy(output, teacher)

    step = step_of(converted(), distill=distill, teacher="ema", ema_decay=0.5)
    images, labels = images_and_labels(8)
    full = step(images, labels).outputs[0]
    # Before the first update the average is the network.
    torch.testing.assert_close(seen[0], full)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teacher", "word"),
    [(tiny(5), r"\(8, 5\)"), (lambda images: None, "NoneType"), ("big", "'big'"), ("ema", "ema")],
)
def test_a_teacher_that_does_not_fit_changes_nothing(teacher, word: str) -> None:
    torch.manual_seed(0)
    model = converted(tiny(dropout=0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chance = torch.get_rng_state()
    with pytest.raises(aw.AnywidthError, match=word):
        step_of(model, teacher=teacher)(*images_and_labels(8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_is_no_teacher_of_itself() -> None:
    model = converted()
    with pytest.raises(aw.AnywidthError, match="in training"):
        step_of(model, teacher=model)


def test_a_teacher_needs_a_distillation() -> None:
    with pytest.raises(aw.AnywidthError, match="distill"):
        step_of(converted(), distill=None, teacher=tiny())
