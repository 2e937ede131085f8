"""Statistics belong to the weights they were made with: other weights have none."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from tiny_networks import PIXELS, batches_of, converted, images_and_labels, tiny
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]
IMAGES = batches_of([8], seed=7)[0]

Change = Callable[[nn.Module], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return converted()


def trained(model: nn.Module, steps: int = 5, optimizer: Any = None, **options: Any) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, **options)
    for number in range(steps):
        step(*images_and_labels(16, seed=number))
    return model


def calibrated(model: nn.Module, widths: Any = WIDTHS) -> nn.Module:
    aw.calibrate(model, batches_of([16, 16]), widths)
    return model


def evaluated(model: nn.Module, width: float) -> Tensor:
    model.eval()
    with aw.at_width(model, width), torch.no_grad():
        return model(IMAGES)


def assert_refused(model: nn.Module, width: float) -> None:
    model.eval()
    with aw.at_width(model, width), pytest.raises(aw.AnywidthError, match="calibrate"):
        model(IMAGES)
    with torch.no_grad(), pytest.raises(aw.AnywidthError, match="other weights"):
        evaluated(model, width)


# ---- averages of weights -------------------------------------------------------------------------


def swa(model: nn.Module) -> tuple[nn.Module, Change]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return average.module, average.update_parameters


def timm_ema(model: nn.Module) -> tuple[nn.Module, Change]:
    average = ModelEmaV3(model, decay=0.5, foreach=True)
    return average.module, average.update


def own_ema(model: nn.Module) -> tuple[nn.Module, Change]:
    average = copy.deepcopy(model)

    def update(other: nn.Module) -> None:
        for mine, its in zip(average.parameters(), other.parameters(), strict=True):
            mine.data.mul_(0.5).add_(its.data, alpha=0.5)

    return average, update


@pytest.mark.parametrize("make", [swa, timm_ema, own_ema])
def test_an_average_of_weights_has_no_statistics(make: Any) -> None:
    model = trained(network())
    average, update = make(model)
    assert torch.equal(evaluated(average, 0.25), evaluated(model, 0.25)), "no weight has changed"
    update(trained(model))
    assert_refused(average, 0.25)
    assert aw.calibrated_widths(average) == [1.0]
    assert aw.calibrated_widths(model) == [0.25, 1.0], "those are tracked"
    calibrated(average)
    evaluated(average, 0.25)
    update(trained(model))
    assert_refused(average, 0.5)


def test_an_average_that_stays_at_one_width_is_looked_at_in_every_pass() -> None:
    model = calibrated(trained(network())).eval()
    aw.set_width(model, 0.25)
    average, update = own_ema(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    with torch.no_grad():
        average(IMAGES)
        update(model)
        with pytest.raises(aw.AnywidthError, match="calibrate"):
            average(IMAGES)


# ---- training on ---------------------------------------------------------------------------------


def fused(model: nn.Module) -> None:
    before = [parameter._version for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    trained(model, optimizer=optimizer)
    assert [parameter._version for parameter in model.parameters()] == before, "as it is known for"


def loaded(model: nn.Module) -> None:
    model.load_state_dict(trained(network(), 3).state_dict())


def written(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01


def one_filter_zeroed(model: nn.Module) -> None:
    with torch.no_grad():
        model[4].state_dict()["weight"][5].zero_()


@pytest.mark.parametrize("change", [trained, fused, loaded, written, one_filter_zeroed])
def test_other_weights_are_uncalibrated(change: Change, tmp_path: Path) -> None:
    model = calibrated(trained(network()))
    evaluated(model, 0.5)
    change(model)
    assert_refused(model, 0.5)
    assert 0.5 not in aw.calibrated_widths(model)
    with pytest.warns(UserWarning, match="calibrated"):
        aw.extract(model, 0.5)
    aw.save(model, tmp_path / "network")
    twin = network()
    aw.load(twin, tmp_path / "network")
    assert 0.5 not in aw.calibrated_widths(twin)
    calibrated(model)
    evaluated(model, 0.5)


def test_calibrated_widths_that_training_visits_are_not_taken_for_tracked() -> None:
    """A moving average would be mostly of old weights."""
    model = calibrated(network())
    trained(model, distill=None, widths=aw.Sampling("fixed", widths=(0.5, 1.0)))
    assert_refused(model, 0.5)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_tracked_widths_stay_valid(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters(), 0.01, fused=True)
    for _ in range(3):
        trained(model, 2, optimizer)
        first = evaluated(model, 0.25)
        assert torch.equal(evaluated(model, 0.25), first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(aw.extract(model, 0.25).eval()(IMAGES), first)


def test_a_tracked_width_that_training_leaves_out_is_uncalibrated() -> None:
    model = trained(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(110):
        F.cross_entropy(model(images_and_labels(4, number)[0]), torch.arange(4)).backward()
        optimizer.step()
    assert_refused(model, 0.25)


def test_frozen_norms_keep_what_the_network_learns_with() -> None:
    model = calibrated(trained(network()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(3):
        model.train()
        model[1].eval()
        model[5].eval()
        images, labels = images_and_labels(8, number)
        with aw.at_width(model, 0.5):
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    evaluated(model, 0.5)
    with torch.no_grad():
        model[0].state_dict()["weight"].mul_(2)
    assert_refused(model, 0.5)


# ---- the same weights ----------------------------------------------------------------------------


def moved_there_and_back(model: nn.Module) -> nn.Module:
    weights = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert_refused(model, 0.5)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return model


def loaded_again(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return model


def head_trained(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[9].state_dict()["weight"].mul_(2)
    return model


SAME: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "shared": nn.Module.share_memory,
    "there and back": moved_there_and_back,
    "loaded again": loaded_again,
    "head trained": head_trained,
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_weights_keep_their_statistics(name: str) -> None:
    model = SAME[name](calibrated(trained(network())))
    assert aw.calibrated_widths(model) == WIDTHS
    dtype = next(model.parameters()).dtype
    with aw.at_width(model.eval(), 0.5), torch.no_grad():
        model(IMAGES.to(dtype))


def test_statistics_of_a_network_without_values_are_not_looked_at() -> None:
    images = torch.empty(2, 1, PIXELS, PIXELS, device="meta")
    model = aw.slimmable(tiny().to("meta"), example_input=images)
    with aw.at_width(model, 0.25):
        model.train()(images)
        model.eval()(images)


def test_other_weights_given_in_a_call_are_uncalibrated() -> None:
    model = calibrated(trained(network())).eval()
    weights = {name: 2 * tensor for name, tensor in model.named_parameters()}
    with aw.at_width(model, 0.5), torch.no_grad():
        with pytest.raises(aw.AnywidthError, match="calibrate"):
            torch.func.functional_call(model, weights, IMAGES)
        torch.func.functional_call(model, dict(model.named_parameters()), IMAGES)
        with pytest.raises(aw.AnywidthError, match="calibrate"):
            torch.func.functional_call(model, weights, IMAGES)
        model(IMAGES)


def test_a_compiled_network_with_other_weights_is_uncalibrated() -> None:
    torch._dynamo.reset()
    model = calibrated(trained(network())).eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        with aw.at_width(model, 0.5):
            compiled(IMAGES)
        model[0].state_dict()["weight"].mul_(2)
        with aw.at_width(model, 0.5), pytest.raises(aw.AnywidthError, match="calibrate"):
            compiled(IMAGES)
    torch._dynamo.reset()


def test_a_width_left_untrained_for_long_is_not_saved_as_calibrated(tmp_path: Path) -> None:
    """No evaluation came between, which would have noticed it."""
    model = trained(network())
    trained(model, 150, widths=aw.Sampling("fixed", widths=(1.0,)))
    aw.save(model, tmp_path / "network.safetensors")
    other = network()
    aw.load(other, tmp_path / "network.safetensors")
    assert aw.calibrated_widths(model) == aw.calibrated_widths(other) == [1.0]
    assert_refused(other, 0.25)
    with pytest.warns(UserWarning, match="not calibrated"):
        aw.extract(model, 0.25)


@pytest.mark.parametrize("mode", [True, False])
def test_a_network_in_training_mode_is_not_measured_or_exported_with_old_statistics(
    mode: bool, tmp_path: Path
) -> None:
    """The narrowest width too, whose statistics follow the weights in training."""
    model = calibrated(trained(network())).train(mode)
    with torch.no_grad():
        model[0].weight.mul_(1.1)  # type: ignore[index]
    with pytest.raises(aw.AnywidthError, match="other weights"):
        aw.spectrum(model, lambda model: {"top1_error": 1.0}, [0.25])
    with pytest.raises(aw.AnywidthError, match="other weights"):
        aw.export_bundle(model, tmp_path / "net.anywidth", [0.25], progress=False)
    assert aw.calibrated_widths(model) == [1.0]
