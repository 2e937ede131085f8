"""Scale and bias per width, tuned after training: what changes, where they go, when they end."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import anywidth_runtime
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded_passes import RecordedPasses
from tiny_networks import batches_of, converted, images_and_labels, tiny, without_norms
from torch import Tensor, nn

import anywidth as aw
from anywidth.files import load_tensors, save_tensors
from anywidth.slimming.norm_statistics import batch_statistics, norm_records
from anywidth.slimming.switchable import add_private_affine
from anywidth.training.engine.graphs import GraphEngine

WIDTHS = [0.25, 0.5]
BATCHES = [images_and_labels(32, seed) for seed in range(4)]


def network(steps: int = 4, widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)) -> nn.Module:
    """A tiny network, trained a little and calibrated."""
    torch.manual_seed(0)
    model = converted()
    step = step_of(model)
    for number in range(steps):
        step(*BATCHES[number % 4])
    aw.calibrate(model, BATCHES, widths)
    return model.eval()


def step_of(model: nn.Module) -> aw.SandwichStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return aw.SandwichStep(model, optimizer, F.cross_entropy)


def tuned(**options) -> nn.Module:
    model = network()
    options = {"epochs": 3, "learning_rate": 0.05, **options}
    aw.tune_norms(model, BATCHES, WIDTHS, F.cross_entropy, **options)
    return model


@torch.no_grad()
def outputs(model: nn.Module, width: aw.ChannelConfig | float) -> Tensor:
    images = images_and_labels(8, 99)[0].to(next(model.parameters()).dtype)
    with aw.at_width(model, width):
        return model(images)


@torch.no_grad()
def loss(model: nn.Module, width: float) -> float:
    with aw.at_width(model, width):
        return sum(F.cross_entropy(model(images), labels).item() for images, labels in BATCHES)


def scale(model: nn.Module, width: float) -> Tensor:
    with aw.at_width(model, width):
        return model[1].weight.detach().clone()  # type: ignore[index]


# ---- what changes --------------------------------------------------------------------------------


def test_tuned_widths_learn_and_all_else_stays() -> None:
    before, after = network(), tuned()
    assert aw.calibrated_widths(after) == aw.calibrated_widths(before)
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name
    for width in (0.75, 1.0):
        assert torch.equal(outputs(before, width), outputs(after, width))
    for width in WIDTHS:
        assert loss(after, width) < loss(before, width) - 0.02
    assert not torch.equal(scale(after, 0.25), scale(after, 0.5)[:4])
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_tuning_goes_on_from_what_was_tuned() -> None:
    once, twice = tuned(), tuned()
    aw.tune_norms(twice, BATCHES, [0.25], F.cross_entropy, epochs=3, learning_rate=0.05)
    assert loss(twice, 0.25) < loss(once, 0.25)
    assert torch.equal(outputs(twice, 0.5), outputs(once, 0.5))


def test_the_full_width_may_teach() -> None:
    by_labels, by_full = tuned(), tuned(distill=aw.soft_cross_entropy)
    assert not torch.equal(scale(by_labels, 0.5), scale(by_full, 0.5))
    assert torch.equal(outputs(by_full, 1.0), outputs(by_labels, 1.0))


def test_switches_of_a_slimmable_network_can_be_tuned() -> None:
    model = converted()
    add_private_affine(model, [0.25, 1.0])
    aw.calibrate(model, BATCHES, [0.25, 0.5, 1.0])
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    known = loss(model, 0.25)
    aw.tune_norms(model, BATCHES, WIDTHS, F.cross_entropy, learning_rate=0.05)
    assert loss(model, 0.25) < known
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(aw.extract(model, 0.25).eval()(BATCHES[0][0]), at(model, 0.25))


def at(model: nn.Module, width: float) -> Tensor:
    with aw.at_width(model, width):
        return model(BATCHES[0][0])


# ---- where they go -------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
def test_a_sliced_network_equals_the_extracted_one(fold: bool) -> None:
    model = tuned()
    for width in (*WIDTHS, 0.75, 1.0):
        small = aw.extract(model, width, fold=fold)
        torch.testing.assert_close(small.eval()(images_and_labels(8, 99)[0]), outputs(model, width))
        assert not any("private" in name for name in small.state_dict())


def test_a_file_keeps_them(tmp_path: Path) -> None:
    model, other = tuned(), converted().eval()
    aw.save(model, tmp_path / "net.safetensors")
    aw.load(other, tmp_path / "net.safetensors")
    again = converted().eval()
    again.load_state_dict(model.state_dict())
    aw.load_statistics_state(again, aw.statistics_state(model))
    for width in (*WIDTHS, 0.75, 1.0):
        assert torch.equal(outputs(other, width), outputs(model, width))
        assert torch.equal(outputs(again, width), outputs(model, width))
    aw.load_statistics_state(again, aw.statistics_state(network()))  # which has none
    assert torch.equal(outputs(again, 0.5), outputs(network(), 0.5))


@pytest.mark.parametrize("change", ["lacks", "shape"])
def test_a_damaged_file_is_named(change: str, tmp_path: Path) -> None:
    model, path = tuned(), tmp_path / "net.safetensors"
    aw.save(model, path)
    tensors, about = load_tensors(path)
    assert about["anywidth"] == "2"
    name = "statistics/0/1.bias"
    tensors[name] = torch.zeros(3)
    if change == "lacks":
        del tensors[name]
    save_tensors(path, tensors, about)
    with pytest.raises(aw.AnywidthError, match=r"1\.bias"):
        aw.load(model, path)


def test_copies_have_their_own() -> None:
    model = tuned()
    before = {width: outputs(model, width) for width in WIDTHS}
    for width in WIDTHS:  # a replica shares them
        assert torch.equal(outputs(aw.replica(model), width), before[width])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for width in WIDTHS:
            assert torch.equal(outputs(twin, width), before[width])
        double = twin.double()
        torch.testing.assert_close(outputs(double, 0.5).float(), before[0.5])
        aw.tune_norms(
            double, [(x.double(), y) for x, y in BATCHES], [0.5], F.cross_entropy, learning_rate=0.1
        )
    for width in WIDTHS:
        assert torch.equal(outputs(model, width), before[width])


def test_a_bundle_holds_them(tmp_path: Path) -> None:
    model = tuned()
    path = tmp_path / "net.anywidth"
    aw.export_bundle(model, path, [*WIDTHS, 1.0], measure_latency=False, progress=False)
    images = images_and_labels(8, 99)[0]
    found = anywidth_runtime.open(path)
    for width in (*WIDTHS, 1.0):
        output = found.run(images.numpy(), width=width)
        np.testing.assert_allclose(output, outputs(model, width).numpy(), rtol=1e-4, atol=1e-4)


def test_a_compiled_network_uses_them() -> None:
    model = tuned()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for width in (0.25, 1.0, 0.5):
        with torch.no_grad(), aw.at_width(model, width):
            assert torch.equal(compiled(images_and_labels(8, 99)[0]), outputs(model, width))
    torch._dynamo.reset()


# ---- when they end -------------------------------------------------------------------------------


def test_calibrating_again_keeps_them_while_the_weights_stay() -> None:
    model = tuned()
    before = outputs(model, 0.5)
    aw.calibrate(model, BATCHES, [0.25, 0.5, 0.75])
    torch.testing.assert_close(outputs(model, 0.5), before)


@pytest.mark.parametrize("by_graphs", [False, True])
def test_training_ends_them(by_graphs: bool) -> None:
    model = tuned()
    shared = scale(network(), 0.25)
    step = step_of(model)
    if by_graphs:
        passes = RecordedPasses(False)
        step.engine = GraphEngine(model, step.parameters, step.engine.objective, capture=passes)
        step(*BATCHES[0])
        model.eval()
        aw.calibrate(model, BATCHES, WIDTHS)
        aw.tune_norms(model, BATCHES, WIDTHS, F.cross_entropy)
    step(*BATCHES[0])
    model.eval()
    # The narrowest is tracked in training, and stays calibrated; the other does not.
    full = model[1]._parameters["weight"]  # type: ignore[index]
    assert torch.equal(scale(model, 0.25), full[:4].detach())
    assert not torch.equal(scale(model, 0.25), shared)
    with pytest.raises(aw.AnywidthError, match="other weights"):
        outputs(model, 0.5)
    with batch_statistics(model):
        assert torch.equal(scale(model, 0.5), full[:8].detach())
    aw.calibrate(model, BATCHES, [0.5])
    assert torch.equal(scale(model, 0.5), full[:8].detach())
    assert aw.statistics_state(model).keys() == aw.statistics_state(network()).keys()


def test_the_weights_of_before_bring_them_back() -> None:
    model = tuned()
    before, weights = outputs(model, 0.5), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.mul_(1.1)  # type: ignore[index]
    with pytest.raises(aw.AnywidthError, match="other weights"):
        outputs(model, 0.5)
    with pytest.warns(UserWarning, match="not calibrated"):
        small = aw.extract(model, 0.5)
    assert torch.equal(small[1].weight, model[1]._parameters["weight"][:8])  # type: ignore[index]
    model.load_state_dict(weights)
    assert torch.equal(outputs(model, 0.5), before)


def test_training_mode_uses_the_shared_ones() -> None:
    model, plain = tuned(), network()
    model.train(), plain.train()
    assert torch.equal(outputs(model, 0.5), outputs(plain, 0.5))


# ---- what is refused -----------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    found = {**model.state_dict(), **aw.statistics_state(model)}
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("widths", "options", "word"),
    [([0.75], {}, "0.75"), ([1.0], {}, "full"), ([], {}, "widths"),
     ([0.5], {"epochs": 0}, "epochs"),
     ([0.5], {"learning_rate": -1}, "learning_rate"), ([0.5], {"truth": 2}, "truth"),
     ([0.5], {"learning_rate": 1e30}, "infinite|diverged"), ([0.5], {"loss": "mse"}, "mse"),
     ([0.5], {"loader": []}, "no data"), ([0.5], {"loader": iter(BATCHES)}, "once"),
     ([0.5], {"calibration": []}, "no data"), ([0.5], {"distill": F.cross_entropy}, "distill")],
)  # fmt: skip
def test_bad_input_changes_nothing(widths, options, word: str) -> None:
    model = network(widths=(0.25, 0.5, 1.0))
    before = snapshot(model)
    options = {"loader": BATCHES, "loss": F.cross_entropy, **options}
    with pytest.raises(aw.AnywidthError, match=word):
        aw.tune_norms(model, widths=widths, **options)
    after = snapshot(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert not any(record.is_calibrating for record in norm_records(model).values())


def test_networks_without_a_scale_of_their_own_are_named() -> None:
    with pytest.raises(aw.AnywidthError, match="no batch norm"):
        aw.tune_norms(converted(without_norms()), BATCHES, [0.5], F.cross_entropy)
    shared = tiny()
    shared[5].weight = shared[1].weight
    model = converted(shared)
    aw.calibrate(model, batches_of([32, 32]), [0.5])
    with pytest.raises(aw.AnywidthError, match="shares"):
        aw.tune_norms(model, BATCHES, [0.5], F.cross_entropy)
