"""An average of the weights: how it moves, teaches, is kept and resumes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels, tiny, without_norms
from torch import Tensor, nn

import anywidth as aw


def step_of(model: nn.Module, **options) -> aw.SandwichStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return aw.SandwichStep(model, optimizer, F.cross_entropy, **options)


def train(step: aw.SandwichStep, numbers: range) -> None:
    for number in numbers:
        step(*images_and_labels(16, number))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def batches() -> list[Tensor]:
    return [images_and_labels(16, seed)[0] for seed in range(4)]


def test_the_average_moves_by_its_decay() -> None:
    torch.manual_seed(0)
    model = converted()
    step = step_of(model, ema_decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():  # after the step was made: they count
            parameter.add_(0.1)
    expected = weights(model)
    for number in range(8):
        step(*images_and_labels(16, number))
        share = min(0.5, (2 + number) / (11 + number))
        pairs = zip(expected, weights(model), strict=True)
        expected = [share * one + (1 - share) * now for one, now in pairs]
    assert step.ema is not None
    assert step.ema.updates == 8
    torch.testing.assert_close(weights(step.ema.network), expected)


def test_backward_alone_leaves_it_to_the_optimizer() -> None:
    model = converted()
    step = step_of(model, ema_decay=0.9)
    step.backward(*images_and_labels(16), scale=0.5)
    step.backward(*images_and_labels(16), scale=0.5)
    assert step.ema.updates == 0
    step.optimizer.step()
    assert step.ema.updates == 1


def test_keeping_the_average_calibrates_every_known_width() -> None:
    torch.manual_seed(0)
    model = converted()
    step = step_of(model, ema_decay=0.9)
    train(step, range(6))
    aw.calibrate(model, batches(), [0.5])
    average = weights(step.ema.network)
    step.ema.copy_to(model, batches())
    torch.testing.assert_close(weights(model), average)
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
    fresh = copy.deepcopy(model)
    aw.calibrate(fresh, batches(), [0.25, 0.5, 1.0])
    images, _ = images_and_labels(16, 9)
    model.eval(), fresh.eval()
    for width in (0.25, 0.5, 1.0):
        with aw.at_width(model, width), aw.at_width(fresh, width):
            torch.testing.assert_close(model(images), fresh(images))


def test_an_average_without_batches_is_not_kept() -> None:
    torch.manual_seed(0)
    model = converted()
    step = step_of(model, ema_decay=0.9)
    train(step, range(2))
    before = weights(model)
    with pytest.raises(aw.AnywidthError, match="loader"):
        step.ema.copy_to(model)
    with pytest.raises(aw.AnywidthError, match="no data"):
        step.ema.copy_to(model, [])
    assert all(map(torch.equal, before, weights(model)))
    with pytest.raises(aw.AnywidthError, match="other weights"):
        step.ema.copy_to(converted(tiny(5)), batches())


def test_a_network_without_norms_needs_no_batches() -> None:
    model = converted(without_norms())
    step = step_of(model, ema_decay=0.9)
    train(step, range(2))
    step.ema.copy_to(model)
    assert all(map(torch.equal, weights(model), weights(step.ema.network)))


def test_a_step_resumes_with_its_average_bit_for_bit() -> None:
    def new() -> aw.SandwichStep:
        torch.manual_seed(0)
        return step_of(converted(), ema_decay=0.9, teacher="ema")

    whole = new()
    train(whole, range(6))
    first = new()
    train(first, range(3))
    second = new()
    second.model.load_state_dict(first.model.state_dict())
    state = aw.statistics_state(first.model)
    aw.load_statistics_state(second.model, state)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, range(3, 6))
    assert all(map(torch.equal, weights(whole.model), weights(second.model)))
    assert all(map(torch.equal, weights(whole.ema.network), weights(second.ema.network)))


def test_a_state_without_its_average_is_named() -> None:
    with_average, without = step_of(converted(), ema_decay=0.9), step_of(converted())
    with pytest.raises(aw.AnywidthError, match="without ema_decay"):
        with_average.load_state_dict(without.state_dict())
    with pytest.raises(aw.AnywidthError, match="with ema_decay"):
        without.load_state_dict(with_average.state_dict())
    with pytest.raises(aw.AnywidthError, match="updates"):
        with_average.load_state_dict({"count": 3, "ema": {}})


@pytest.mark.parametrize("decay", [0, 1, -0.5, float("nan"), "0.9", True])
def test_a_decay_that_is_none_is_named(decay) -> None:
    with pytest.raises(aw.AnywidthError, match="decay"):
        step_of(converted(), ema_decay=decay)


def test_an_average_needs_an_optimizer() -> None:
    with pytest.raises(aw.AnywidthError, match="optimizer"):
        aw.SandwichStep(converted(), None, F.cross_entropy, ema_decay=0.9)


def test_an_average_of_half_precision_weights_does_not_stand_still() -> None:
    """An update of bfloat16 by a thousandth of the difference is rounded away."""
    model = without_norms_converted().bfloat16()
    average = aw.WeightAverage(model, 0.999)
    average.updates = 10**6
    before = average.network[1].weight.float()  # type: ignore[index]
    with torch.no_grad():
        model[1].weight.add_(1.0)  # type: ignore[index]
    now = model[1].weight.float()  # type: ignore[index]
    for _ in range(500):
        average.update()
    share = 0.999**500
    expected = share * before + (1 - share) * now
    found = average.network[1].weight  # type: ignore[index]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.01, rtol=0.01)

    other = aw.WeightAverage(copy.deepcopy(model), 0.999)
    other.load_state_dict(average.state_dict())
    for one in (average, other):
        one.update()
    assert_equal(average, other)


def assert_equal(one: aw.WeightAverage, other: aw.WeightAverage) -> None:
    mine, its = one.state_dict(), other.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    torch.testing.assert_close(weights(one.network), weights(other.network), rtol=0, atol=0)


def without_norms_converted() -> nn.Module:
    torch.manual_seed(0)
    return converted(without_norms())


def test_it_follows_a_network_that_is_cast_before_its_first_step() -> None:
    model = converted()
    step = step_of(model, ema_decay=0.5)
    model.double()
    images, labels = images_and_labels(16)
    step(images.double(), labels)
    assert step.ema is not None
    assert step.ema.network[0].weight.dtype == torch.float64  # type: ignore[index]


def test_a_copy_of_a_step_has_an_average_of_its_own() -> None:
    step = step_of(converted(), ema_decay=0.9)
    train(step, range(2))
    twin = copy.deepcopy(step)
    train(twin, range(2, 4))
    assert step.ema is not None
    assert twin.ema is not None
    assert (step.ema.updates, twin.ema.updates) == (2, 4)
    train(step, range(2, 4))
    assert_equal(step.ema, twin.ema)
    torch.testing.assert_close(weights(step.model), weights(twin.model), rtol=0, atol=0)
    assert copy.copy(step).ema is step.ema
    train(step, range(4, 5))
    assert step.ema.updates == 5


def test_the_average_has_no_statistics_until_it_is_calibrated() -> None:
    """The buffers of a full width are those of other weights."""
    model = converted()
    step = step_of(model, ema_decay=0.9, teacher="ema")
    train(step, range(3))
    assert step.ema is not None
    network, images = step.ema.network, batches()
    assert aw.calibrated_widths(network) == []
    with torch.no_grad(), pytest.raises(aw.AnywidthError, match="full width"):
        network(images[0])
    with pytest.warns(UserWarning, match="not calibrated"):
        aw.extract(network, 1.0)
    aw.calibrate(network, images, [1.0])
    found = network(images[0])
    other = copy.deepcopy(model)
    step.ema.copy_to(other, images)
    torch.testing.assert_close(found, other.eval()(images[0]))
    train(step, range(3, 4))
    with torch.no_grad(), pytest.raises(aw.AnywidthError, match="full width"):
        network(images[0])
    network.load_state_dict(other.state_dict())
    torch.testing.assert_close(network(images[0]), found.detach())
