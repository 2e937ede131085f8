"""The baselines: slimmable networks with switches, and networks of one width."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels, tiny
from torch import nn

import anywidth as aw
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.planning.cuts import is_converted
from anywidth.slimming.convert import track_statistics
from anywidth.slimming.switchable import add_private_affine
from anywidth.training.statistics_state import load_statistics, statistics_to_tensors

SWITCHES = (0.25, 0.5, 1.0)


def slimmable_network(private: bool, steps: int = 0) -> nn.Module:
    """An S-Net with three switches, trained for a few steps."""
    torch.manual_seed(0)
    model = converted()
    for width in SWITCHES:
        track_statistics(model, width)
    if private:
        add_private_affine(model, SWITCHES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampling = aw.Sampling("fixed", widths=SWITCHES)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, distill=None, widths=sampling)
    for number in range(steps):
        step(*images_and_labels(16, seed=number))
    return model


def affine(model: nn.Module, width: float) -> list[torch.Tensor]:
    with aw.at_width(model, width):
        return [t.detach().clone() for n in (1, 5) for t in (model[n].weight, model[n].bias)]  # type: ignore[index]


@pytest.mark.parametrize("private", [False, True])
def test_every_switch_has_its_own_statistics(private: bool) -> None:
    model = slimmable_network(private, steps=6).eval()
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
    means = []
    for width in SWITCHES:
        with aw.at_width(model, width), torch.no_grad():
            assert model(images_and_labels(4)[0]).isfinite().all()
            means.append(model[5].running_mean[:4].clone())  # type: ignore[index]
    assert not torch.allclose(means[0], means[1])
    assert not torch.allclose(means[1], means[2])


def test_a_shared_scale_is_the_first_channels_of_one() -> None:
    model = slimmable_network(private=False, steps=3)
    for narrow, full in zip(affine(model, 0.5), affine(model, 1.0), strict=True):
        assert torch.equal(narrow, full[:8])


def test_private_scales_train_apart() -> None:
    model = slimmable_network(private=True, steps=6)
    names = [name for name, _ in model.named_parameters() if "private_affine" in name]
    assert len(names) == 8
    assert "1.private_affine.weight.0" in names
    for quarter, half, full in zip(*(affine(model, w) for w in SWITCHES), strict=True):
        assert [len(quarter), len(half), len(full)] == [4, 8, 16]
        assert not torch.allclose(quarter, half[:4])
        assert not torch.allclose(half, full[:8])


def test_private_scales_start_as_an_ordinary_batch_norm() -> None:
    model = slimmable_network(private=True)
    plain = converted()
    plain.load_state_dict(model.state_dict(), strict=False)
    images, _ = images_and_labels(4)
    for width in SWITCHES:
        with aw.at_width(model, width), aw.at_width(plain, width), torch.no_grad():
            torch.testing.assert_close(model(images), plain(images))


def test_a_width_between_switches_uses_the_shared_scale() -> None:
    model = slimmable_network(private=True, steps=3)
    for narrow, full in zip(affine(model, 0.75), affine(model, 1.0), strict=True):
        assert torch.equal(narrow, full[:12])


@pytest.mark.parametrize("fold", [False, True])
def test_extraction_takes_the_private_scale_and_leaves_no_trace(fold: bool) -> None:
    model = slimmable_network(private=True, steps=6).eval()
    images, _ = images_and_labels(4)
    for width in SWITCHES:
        small = aw.extract(model, width, fold=fold).eval()
        with aw.at_width(model, width), torch.no_grad():
            torch.testing.assert_close(small(images), model(images), atol=1e-5, rtol=1e-5)
        assert not any("private" in name for name in small.state_dict())
        assert not any("private" in name for name, _ in small.named_modules())
        assert not is_converted(small)
        assert all(type(m).__module__.startswith("torch.nn") for m in small.modules())
        if not fold:
            channels = int(16 * width)
            plain = tiny()
            assert list(small.state_dict()) == list(plain.state_dict())
            assert small[1].weight.shape == (channels,)  # type: ignore[index]
            assert torch.equal(small[1].weight, affine(model, width)[0])  # type: ignore[index]


def test_a_slimmable_network_survives_a_file() -> None:
    model = slimmable_network(private=True, steps=4).eval()
    twin = slimmable_network(private=True).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    load_statistics(twin, *statistics_to_tensors(model))
    images, _ = images_and_labels(4)
    for width in SWITCHES:
        with aw.at_width(model, width), aw.at_width(twin, width), torch.no_grad():
            assert torch.equal(model(images), twin(images))


def test_a_network_without_batch_norm_is_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    aw.slimmable(network, example_input=torch.randn(2, 4))
    with pytest.raises(aw.AnywidthError, match="batch norm"):
        add_private_affine(network, [0.5, 1.0])


# ---- the networks a configuration builds ---------------------------------------------------------


def built(**options: object) -> nn.Module:
    settings = ClassificationSettings(model="mobilenet_v1", total_stride=16, **options)  # type: ignore[arg-type]
    return build_model(settings, 10, (1, 28, 28))


def shapes(model: nn.Module) -> dict[str, Sequence[int]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_an_individual_network_is_built_at_its_width() -> None:
    narrow = built(method="i", width=0.25)
    wide = built(method="us")
    with pytest.warns(UserWarning, match="calibrated"):
        assert shapes(narrow) == shapes(aw.extract(wide, 0.25))
    for name, module in narrow.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
            own_scale = math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels))
            assert float(module.weight.detach().std()) == pytest.approx(own_scale, rel=0.1), name
    for module in narrow.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.running_mean, torch.zeros_like(module.running_mean))
    assert aw.plan_of(narrow).lattice() == [aw.plan_of(narrow).full]


def test_an_individual_network_trains_at_its_one_width() -> None:
    settings = ClassificationSettings(method="i", width=0.25)
    narrow = built(method="i", width=0.25)
    assert aw.sample_widths(narrow, 5, settings.sampling()) == [aw.plan_of(narrow).full]


def test_a_slimmable_configuration_visits_its_switches() -> None:
    settings = ClassificationSettings(
        model="tiny_networks:tiny", divisor=4, method="s", switches=(0.25, 1.0),
        private_affine=True,
    )  # fmt: skip
    model = build_model(settings, 10, (1, 12, 12))
    plan = aw.plan_of(model)
    assert aw.sample_widths(model, 0, settings.sampling()) == [plan.full, plan.narrowest]
    assert model[1].private_affine.weight[0].shape == (4,)  # type: ignore[index]
