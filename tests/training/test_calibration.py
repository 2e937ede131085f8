"""Batch-norm statistics of any width, after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from norm_moments import Moments, assert_moments, known
from tiny_networks import batches_of, converted, images_and_labels, nonuniform, shaken, tiny
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anywidth as aw
from anywidth.slimming.convert import track_statistics
from anywidth.slimming.norm_statistics import Statistics, buffers_kept, norm_records
from anywidth.training.calibration import is_full_width_new
from anywidth.training.statistics_state import statistics_to_tensors


@pytest.fixture
def model() -> nn.Module:
    return shaken()


def batch_moments(model: nn.Module, images: Tensor, channels: tuple[int, int]) -> Moments:
    """Mean and unbiased variance at both norms for one batch, by hand, in float64."""
    values = {name: tensor.double() for name, tensor in model.state_dict().items()}
    found: Moments = []
    x, inputs = images.double(), 1
    for conv, norm, active in ((0, 1, channels[0]), (4, 5, channels[1])):
        x = F.conv2d(x, values[f"{conv}.weight"][:active, :inputs], stride=2, padding=1)
        flat = x.transpose(0, 1).reshape(active, -1)
        mean = flat.sum(1) / flat.shape[1]
        squares = ((flat - mean[:, None]) ** 2).sum(1)
        found.append((mean, squares / (flat.shape[1] - 1)))
        deviation = (squares / flat.shape[1] + 1e-5).sqrt()
        scale, bias = values[f"{norm}.weight"][:active], values[f"{norm}.bias"][:active]
        x = (x - mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)
        x = (x * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).clamp(min=0)
        inputs = active
    return found


def exact(model: nn.Module, batches: Sequence[Tensor], channels: tuple[int, int]) -> Moments:
    each = [(len(batch), batch_moments(model, batch, channels)) for batch in batches]
    total = sum(count for count, _ in each)
    return [
        (
            sum((n / total) * moments[layer][0] for n, moments in each),
            sum((n / total) * moments[layer][1] for n, moments in each),
        )
        for layer in range(2)
    ]  # type: ignore[misc]


def bank_of(model: nn.Module, config: aw.ChannelConfig) -> list[Statistics]:
    return [record.bank[config] for record in norm_records(model).values()]


def channels_of(config: aw.ChannelConfig) -> tuple[int, int]:
    return config["0"], config["4"]


# ---- values --------------------------------------------------------------------------------------


def test_exact_statistics_equal_a_float64_reference(model: nn.Module) -> None:
    batches = batches_of([32, 32, 32, 20])
    mixed = nonuniform(model)
    aw.calibrate(model, batches, [0.25, 0.5, 0.75, 1.0, mixed])
    plan = aw.plan_of(model)
    for width in (0.25, 0.5, 0.75, 1.0, mixed):
        channels = channels_of(plan.resolve(width))
        assert_moments(known(model, width), exact(model, batches, channels))


def test_statistics_of_the_full_width_are_in_the_state_dict(model: nn.Module) -> None:
    batches = batches_of([16, 16])
    aw.calibrate(model, batches, [1.0])
    expected = exact(model, batches, (16, 16))
    state = model.state_dict()
    assert_moments([(state[f"{n}.running_mean"], state[f"{n}.running_var"]) for n in (1, 5)],
                   expected)  # fmt: skip


def test_a_moving_average_starts_at_the_first_batch(model: nn.Module) -> None:
    batches = batches_of([16] * 5)
    aw.calibrate(model, batches, [0.5, 1.0], method="moving", momentum=0.3)
    for width, channels in ((0.5, (8, 8)), (1.0, (16, 16))):
        each = [batch_moments(model, batch, channels) for batch in batches]
        expected = each[0]
        for moments in each[1:]:
            expected = [
                (0.7 * mean + 0.3 * new_mean, 0.7 * var + 0.3 * new_var)
                for (mean, var), (new_mean, new_var) in zip(expected, moments, strict=True)
            ]
        assert_moments(known(model, width), expected)


def test_a_subset_takes_so_many_samples_and_reads_no_further(model: nn.Module) -> None:
    batches = batches_of([16] * 6)
    read = []

    def counted() -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            read.append(number)
            yield batch

    aw.calibrate(model, counted(), [0.5], samples=40)
    assert read == [0, 1, 2]
    assert_moments(known(model, 0.5), exact(model, [*batches[:2], batches[2][:8]], (8, 8)))


@pytest.mark.parametrize("sizes", [[8, 8, 1], [1, 8, 8], [8, 1, 8], [1, 1, 1, 1, 1]])
def test_a_batch_of_one_sample_joins_its_neighbour(model: nn.Module, sizes: list[int]) -> None:
    """One sample has no variance where the image is one pixel: it must not stop calibration."""
    model[4].stride = (8, 8)  # type: ignore[index]
    batches = batches_of(sizes)
    aw.calibrate(model, batches, [0.5])
    total = sum(sizes)
    assert all(int(entry.num_batches_tracked) <= max(1, total // 2) for entry in
               bank_of(model, aw.plan_of(model).resolve(0.5)))  # fmt: skip
    for mean, var in known(model, 0.5):
        assert mean.isfinite().all()
        assert var.isfinite().all()


def test_many_widths_share_one_read_of_the_data(model: nn.Module) -> None:
    batches = batches_of([16, 16, 16])

    class Counted:
        reads = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                self.reads += 1
                yield batch, torch.zeros(len(batch))

    loader = Counted()
    aw.calibrate(model, loader, [0.25, 0.5, 0.75, 1.0])
    assert loader.reads == 3
    assert_moments(known(model, 0.75), exact(model, batches, (12, 12)))


def test_calibrating_makes_the_network_normalise_its_data(model: nn.Module) -> None:
    batch = batches_of([64])[0]
    aw.calibrate(model, [batch], [0.5])
    model.eval()
    outputs: list[Tensor] = []
    model[5].register_forward_hook(lambda *arguments: outputs.append(arguments[2]))  # type: ignore[index]
    with aw.at_width(model, 0.5), torch.no_grad():
        model(batch)
    norm = model[5]  # type: ignore[index]
    mean = outputs[0].mean((0, 2, 3))
    torch.testing.assert_close(mean, norm.bias.detach()[:8], atol=1e-4, rtol=1e-3)


# ---- what stays as it was ------------------------------------------------------------------------


def test_everything_else_stays_as_it_was(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16, 16]), [0.5, 1.0])
    model.train()
    model[3].eval()  # type: ignore[index]
    model[1].momentum = 0.37  # type: ignore[index]
    aw.set_width(model, 0.75)
    modes = [m.training for m in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = [e.running_mean.clone() for e in bank_of(model, aw.plan_of(model).resolve(0.5))]
    aw.calibrate(model, batches_of([16], seed=5), [0.25, 0.75])
    assert [m.training for m in model.modules()] == modes
    assert model[1].momentum == 0.37  # type: ignore[index]
    assert model[5].momentum == 0.1  # type: ignore[index]
    assert model[0].out_channels == 12  # type: ignore[index]
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = bank_of(model, aw.plan_of(model).resolve(0.5))
    assert all(torch.equal(a, e.running_mean) for a, e in zip(half, again, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failure_in_the_middle_changes_nothing(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16, 16]), [0.25, 0.5, 1.0])
    before = {width: known(model, width) for width in (0.25, 0.5, 1.0)}
    model.train()
    aw.set_width(model, 0.5)

    def breaking() -> Iterator[Tensor]:
        yield from batches_of([16, 16, 16], seed=3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        aw.calibrate(model, breaking(), [0.25, 0.75, 1.0])
    assert model.training
    assert model[0].out_channels == 8  # type: ignore[index]
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
    for width, expected in before.items():
        for found, kept in zip(known(model, width), expected, strict=True):
            assert torch.equal(found[0], kept[0])
            assert torch.equal(found[1], kept[1])


def test_dropout_is_off_while_calibrating(model: nn.Module) -> None:
    model.train()
    batches = batches_of([32])
    aw.calibrate(model, batches, [0.5])
    assert_moments(known(model, 0.5), exact(model, batches, (8, 8)))


# ---- widths without statistics -------------------------------------------------------------------


def test_an_uncalibrated_width_names_those_that_are(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16]), [0.25, 0.5])
    model.eval()
    with aw.at_width(model, 0.75), pytest.raises(aw.AnywidthError) as raised:
        model(batches_of([2])[0])
    message = str(raised.value)
    assert "width 0.75" in message
    assert "[0.25, 0.5]" in message
    assert "anywidth.calibrate(model, loader, widths=[0.75])" in message


def test_extracting_an_uncalibrated_width_warns_and_slices(model: nn.Module) -> None:
    aw.calibrate(model, batches_of([16]), [1.0])
    with pytest.warns(UserWarning, match=r"0\.5"):
        small = aw.extract(model, 0.5)
    assert torch.equal(small[1].running_mean, model[1].running_mean[:8])  # type: ignore[index]


def test_calibrated_widths_lists_what_can_be_evaluated(model: nn.Module) -> None:
    assert aw.calibrated_widths(model) == [1.0]
    mixed = nonuniform(model)
    aw.calibrate(model, batches_of([16]), [0.75, 0.25, mixed])
    assert aw.calibrated_widths(model) == [0.25, 0.75, mixed, 1.0]
    model.eval()
    for width in aw.calibrated_widths(model):
        with aw.at_width(model, width), torch.no_grad():
            assert model(batches_of([2])[0]).isfinite().all()


def test_ends_are_tracked_while_training(model: nn.Module) -> None:
    batches = batches_of([16] * 30)
    model[3].p = 0.0  # type: ignore[index]
    model.train()
    with torch.no_grad():
        for batch in batches:
            for width in (1.0, 0.5, 0.25):
                with aw.at_width(model, width):
                    model(batch)
    assert aw.calibrated_widths(model) == [0.25, 1.0]
    for width, channels in ((0.25, (4, 4)), (1.0, (16, 16))):
        for found, expected in zip(
            known(model, width), exact(model, batches, channels), strict=True
        ):
            torch.testing.assert_close(found[0].double(), expected[0], atol=0.15, rtol=0.15)


def test_any_width_can_be_tracked(model: nn.Module) -> None:
    track_statistics(model, 0.5)
    model.train()
    with aw.at_width(model, 0.5), torch.no_grad():
        model(batches_of([16])[0])
    assert aw.calibrated_widths(model) == [0.5, 1.0]


def test_a_range_that_ends_below_full_width_names_no_width_it_cannot_run() -> None:
    narrow = converted(high=0.5)
    aw.calibrate(narrow, batches_of([16]), [0.25, 0.5])
    assert aw.calibrated_widths(narrow) == [0.25, 0.5, aw.plan_of(narrow).full]
    for width in aw.calibrated_widths(narrow):
        aw.set_width(narrow, width)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [np.array, torch.tensor])
def test_widths_may_be_an_array(model: nn.Module, as_list: Callable[[list[float]], Any]) -> None:
    aw.calibrate(model, batches_of([8]), as_list([0.25, 0.6]))
    assert aw.calibrated_widths(model) == [0.25, pytest.approx(0.6), 1.0]


def test_bad_input_is_named(model: nn.Module) -> None:
    batches = batches_of([8])
    for options, words in (
        ({"widths": []}, "no widths"),
        ({"widths": 0.5}, r"\[0.5\]"),
        ({"widths": None}, "widths="),
        ({"widths": aw.plan_of(model).resolve(0.5)}, "list"),
        ({"widths": [0.5], "method": "mean"}, "'mean'"),
        ({"widths": [0.5], "samples": 1}, "samples"),
        ({"widths": [0.5], "samples": 2.5}, "samples"),
        ({"widths": [0.5], "samples": "all"}, "'all'"),
        ({"widths": [0.5], "method": "moving", "momentum": 5}, "momentum"),
        ({"widths": [0.5], "method": "moving", "momentum": None}, "momentum"),
        ({"widths": ["half"]}, "'half'"),
        ({"widths": [0.1]}, "0.1"),
        ({"widths": [0.5], "loader": None}, "None"),
        ({"widths": [0.5], "loader": batches[0]}, "split"),
        ({"widths": [0.5], "loader": images_and_labels(8)}, r"\(8,\)"),
        ({"widths": [0.5], "loader": TensorDataset(batches[0])}, "DataLoader"),
        ({"widths": [0.5], "loader": []}, "empty"),
        ({"widths": [0.5], "loader": [{"image": batches[0]}]}, "dict"),
    ):
        with pytest.raises(aw.AnywidthError, match=words):
            aw.calibrate(model, **{"loader": batches, **options})  # type: ignore[arg-type]
    assert aw.calibrated_widths(model) == [1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["exact", "moving"])
def test_statistics_of_bad_data_are_refused_and_the_old_ones_stay(
    model: nn.Module, value: float, method: str
) -> None:
    batches = batches_of([8, 8])
    aw.calibrate(model, batches, [0.5, 1.0])
    before = {width: known(model, width) for width in (0.5, 1.0)}
    batches[1][3, 0, 2, 2] = value
    with pytest.raises(aw.AnywidthError, match="NaN"):
        aw.calibrate(model, batches, [0.25, 0.5, 1.0], method=method)  # type: ignore[arg-type]
    assert aw.calibrated_widths(model) == [0.5, 1.0]
    for width, moments in before.items():
        for (mean, var), (old_mean, old_var) in zip(known(model, width), moments, strict=True):
            assert torch.equal(mean, old_mean)
            assert torch.equal(var, old_var)


def test_a_network_without_batch_norm_needs_no_statistics() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    aw.slimmable(network, None, aw.WidthRange(0.5, 1.0, 2), example_input=torch.randn(3, 4))
    with pytest.warns(UserWarning, match="batch norm"):
        aw.calibrate(network, [torch.randn(3, 4)], [0.5])
    assert aw.calibrated_widths(network) == []
    with aw.at_width(network.eval(), 0.5):
        assert network(torch.randn(3, 4)).shape == (3, 2)


def test_a_norm_whose_channels_stay_has_statistics_for_every_width() -> None:
    """What reaches it depends on the width all the same."""
    model = converted(nn.Sequential(*tiny(), nn.BatchNorm1d(10)))
    last = model[-1]  # type: ignore[index]
    images, _ = images_and_labels(64)
    model.train()
    with aw.at_width(model, 0.5):
        model(images)
    assert last.num_batches_tracked == 0  # type: ignore[union-attr]
    aw.calibrate(model, images.split(32), [0.25, 1.0])
    model.eval()
    for width in (0.25, 1.0):
        with aw.at_width(model, width), torch.no_grad():
            outputs = model(images)
        torch.testing.assert_close(outputs.std(0, correction=0), torch.ones(10), atol=0.1, rtol=0)
        torch.testing.assert_close(aw.extract(model, width)(images), outputs)


def test_the_full_width_is_new_until_it_has_seen_something() -> None:
    model = converted()
    images, _ = images_and_labels(32)
    assert is_full_width_new(model)
    aw.calibrate(model, images.split(16), [0.25])
    assert is_full_width_new(model)
    aw.calibrate(model, images.split(16), [1.0])
    assert not is_full_width_new(model)


def test_passes_that_leave_no_trace() -> None:
    model = converted().train()
    images, _ = images_and_labels(16)
    before = {name: tensor.clone() for name, tensor in statistics_to_tensors(model)[0].items()}
    with buffers_kept(model):
        for width in (0.25, 1.0):
            with aw.at_width(model, width):
                model(images)
        assert aw.calibrated_widths(model) == [0.25, 1.0]
    assert aw.calibrated_widths(model) == [1.0]
    assert is_full_width_new(model)
    for name, tensor in statistics_to_tensors(model)[0].items():
        assert torch.equal(tensor, before[name])


def test_statistics_made_in_inference_mode_can_be_trained_on(model: nn.Module) -> None:
    with torch.inference_mode():
        aw.calibrate(model, batches_of([8]), [0.25])
    before = {name: tensor.clone() for name, tensor in statistics_to_tensors(model)[0].items()}
    model.train()
    with aw.at_width(model, 0.25):
        model(*batches_of([8]))
    after = statistics_to_tensors(model)[0]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_width_keeps_its_name_if_it_is_calibrated_as_a_configuration() -> None:
    model = converted()
    batches = batches_of([8, 8])
    aw.calibrate(model, batches, [0.25, 0.5])
    aw.calibrate(model, batches, [aw.plan_of(model).resolve(0.5)])
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
