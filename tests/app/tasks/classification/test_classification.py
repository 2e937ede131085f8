"""The classification task, from a configuration to a trained network on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.runs.loop import scheduled_rate
from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.task import (
    ClassificationSettings,
    TrainedClassifier,
    calibration_images,
    evaluate,
    make_optimizer,
    open_trained,
    train_run,
)

pytestmark = pytest.mark.usefixtures("images_unpacked_once")

TINY = ClassificationSettings(
    model="tiny_networks:tiny",
    divisor=4,
    limit=1000,
    batch_size=50,
    epochs=4,
    learning_rate=0.3,
    device="cpu",
    log_every=10,
)


def trained(settings: ClassificationSettings, folder: Path) -> TrainedClassifier:
    assert train_run(Run.create(folder, settings), settings)
    return open_trained(folder, "cpu", settings=settings)


@pytest.fixture(scope="module")
def us_net(tmp_path_factory: pytest.TempPathFactory) -> TrainedClassifier:
    return trained(TINY, tmp_path_factory.mktemp("runs") / "us")


def top1_error(classifier: TrainedClassifier, width: float) -> float:
    with classifier.at(width):
        return classifier.evaluate(classifier.model)["top1_error"]


# ---- training ------------------------------------------------------------------------------------


def test_one_network_learns_at_every_width(us_net: TrainedClassifier) -> None:
    us_net.calibrate([0.25, 0.5, 0.75, 1.0])
    errors = [top1_error(us_net, width) for width in (0.25, 0.5, 0.75, 1.0)]
    assert max(errors) < 70, errors
    assert errors[3] < errors[0], errors


def test_the_ends_are_validated_while_training(us_net: TrainedClassifier) -> None:
    rows = read_metrics(us_net.run.metrics_path)
    validated = [row for row in rows if row.get("validation_error_max") is not None]
    assert len(validated) == TINY.epochs
    last = validated[-1]
    assert 0 < float(last["validation_error_max"]) < 75
    assert 0 < float(last["validation_error_min"]) < 85
    for name in ("loss_max", "loss_min", "accuracy_max", "accuracy_min", "learning_rate"):
        assert name in rows[0]
    assert float(rows[-1]["loss_max"]) < float(rows[0]["loss_max"])


def test_a_reopened_run_is_the_same_network(us_net: TrainedClassifier) -> None:
    us_net.calibrate([0.5])
    again = open_trained(us_net.run.folder, "cpu", settings=TINY)
    for width in (0.25, 0.5, 1.0):
        assert top1_error(again, width) == top1_error(us_net, width)


def test_images_to_calibrate_with_are_plain_or_augmented(us_net: TrainedClassifier) -> None:
    """The same ones in the same order either way, and the same each time."""
    data, settings = us_net.data, us_net.settings
    assert data is not None
    plain = list(calibration_images(data, settings, 120))
    changed = replace(settings, calibration_augmented=True)
    augmented = [list(calibration_images(data, changed, 120)) for _ in range(2)]
    assert sum(len(labels) for _, labels in plain) == 120
    for (x, labels), (y, same), (z, _) in zip(plain, *augmented, strict=True):
        assert torch.equal(labels, same)
        assert torch.equal(y, z)
        assert not torch.equal(x, y)


def test_few_samples_calibrate_nearly_as_well_as_all(us_net: TrainedClassifier) -> None:
    us_net.calibrate([0.5])
    everything = top1_error(us_net, 0.5)
    us_net.calibrate([0.5], samples=500)
    assert abs(top1_error(us_net, 0.5) - everything) < 2


def test_an_ordinary_network_fails_when_sliced(tmp_path: Path) -> None:
    """The control: calibrated alike, but trained at full width alone."""
    control = trained(replace(TINY, method="i"), tmp_path / "run")
    control.calibrate([0.25, 1.0])
    assert control.widths == [1.0]
    assert top1_error(control, 1.0) < 60
    assert top1_error(control, 0.25) > 75


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "s", "switches": (0.25, 0.5, 1.0), "private_affine": True},
        {"method": "s", "switches": (0.5, 1.0)},
        {"method": "i", "width": 0.5},
        {"nonuniform": True},
        {"lattice": 3},
        {"density": "log-uniform"},
        {"rule": "random"},
        {"rule": "min+random"},
        {"rule": "max+random", "widths_per_step": 2},
        {"distill": False},
        {"temperature": 2.0, "truth": 0.5},
        {"average_outputs": True},
        {"high": 0.75},
        {"validation": "split"},
    ],
    ids=str,
)
def test_every_choice_trains_and_opens(changes: dict[str, object], tmp_path: Path) -> None:
    settings = replace(TINY, limit=100, batch_size=25, epochs=1, **changes)  # type: ignore[arg-type]
    classifier = trained(settings, tmp_path / "run")
    classifier.calibrate(classifier.widths[:2], samples=50)
    for width in classifier.widths[:2]:
        assert 0 <= top1_error(classifier, width) <= 100
    assert classifier.run.state()["steps"] == 4


def test_seeds_decide_the_weights(tmp_path: Path) -> None:
    settings = replace(TINY, limit=100, epochs=1)
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = Run.create(tmp_path / name, replace(settings, seed=seed))
        train_run(run, replace(settings, seed=seed))
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


# ---- parts ---------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls_in_straight_lines() -> None:
    rates = [scheduled_rate(step, total=10, warmup=4, highest=1.0) for step in range(10)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[4:] == pytest.approx([1 - i / 6 for i in range(6)])
    plain = [scheduled_rate(step, total=4, warmup=0, highest=0.5) for step in range(4)]
    assert plain == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_weight_decay_spares_depthwise_convolutions_norms_and_biases() -> None:
    settings = ClassificationSettings(total_stride=16, weight_decay=3e-4)
    model = build_model(settings, 10, (1, 28, 28))
    optimizer = make_optimizer(model, settings)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    for path, module in model.named_modules():
        depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
        for name, parameter in module.named_parameters(recurse=False):
            layer = isinstance(module, nn.Conv2d | nn.Linear) and name == "weight"
            expected = 3e-4 if layer and not depthwise else 0.0
            assert decay[id(parameter)] == expected, f"{path}.{name}"
    assert all(group["nesterov"] for group in optimizer.param_groups)


def test_a_tied_weight_is_stepped_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = make_optimizer(model, ClassificationSettings(head_rate=0.5))
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, stepped)) == sorted(map(id, model.parameters()))


def test_the_last_layer_may_learn_at_a_rate_of_its_own(tmp_path: Path) -> None:
    one_step = replace(TINY, limit=50, epochs=1, weight_decay=0.01)
    before = build_model(one_step, 10, (1, 28, 28)).state_dict()
    moved = []
    for share in (1.0, 0.25):
        classifier = trained(replace(one_step, head_rate=share), tmp_path / str(share))
        parameters = dict(classifier.model.named_parameters())
        moved.append({name: p.detach() - before[name] for name, p in parameters.items()})
    *others, weight, bias = moved[0]
    assert others
    for name in (weight, bias):
        assert moved[0][name].abs().max() > 0
        torch.testing.assert_close(moved[1][name], 0.25 * moved[0][name], rtol=1e-3, atol=1e-7)
    for name in others:
        assert torch.equal(moved[1][name], moved[0][name]), name


def test_evaluation_does_not_depend_on_the_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7))
    images, labels = torch.randn(60, 1, 4, 4), torch.randint(7, (60,))
    logits = model(images).detach()
    ranking = logits.argsort(1, descending=True)
    expected = {
        "top1_error": 100 * (ranking[:, 0] != labels).float().mean(),
        "top5_error": 100 * (ranking[:, :5] != labels[:, None]).all(1).float().mean(),
        "loss": F.cross_entropy(logits, labels),
    }
    for size in (60, 25, 7):
        loader: list[tuple[Tensor, Tensor]] = list(
            zip(images.split(size), labels.split(size), strict=True)
        )
        loader.append((images[:0], labels[:0]))
        found = evaluate(model, loader)  # type: ignore[arg-type]
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), abs=1e-4), name


def test_smoothed_labels_keep_the_loss_above_their_entropy(
    us_net: TrainedClassifier, tmp_path: Path
) -> None:
    smoothed = trained(replace(TINY, label_smoothing=0.5), tmp_path / "smoothed")
    shares = torch.full((10,), 0.05)
    shares[0] = 0.55
    entropy = -float((shares * shares.log()).sum())
    for classifier, is_above in ((smoothed, True), (us_net, False)):
        losses = [row["loss_max"] for row in read_metrics(classifier.run.metrics_path)]
        assert (min(losses) > entropy) is is_above


def test_sampling_follows_the_method() -> None:
    settings = replace(TINY, widths_per_step=3, rule="max+random", lattice=4, seed=9)
    assert settings.sampling() == aw.Sampling("max+random", 3, False, 4, seed=9)
    switches = replace(settings, method="s", switches=(0.5, 1.0))
    assert switches.sampling().widths == (0.5, 1.0)
    assert replace(settings, method="i").sampling().widths == (1.0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch-size"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"method": "i", "width": 1.5}, "width"),
        ({"method": "i", "width": 0.0}, "width"),
        ({"label_smoothing": 1.0}, "label-smoothing"),
        (
            {"total_stride": 8, "strides": (1, 1, 2, 2, 2)},
            "total-stride",
        ),
        ({"data_dir": "here"}, "data-dir"),
    ],
    ids=str,
)
def test_choices_that_would_do_nothing_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    settings = replace(TINY, **changes)  # type: ignore[arg-type]
    with pytest.raises(aw.AnywidthError, match=message):
        train_run(Run.create(tmp_path / "run", settings), settings)


def test_the_spectrum_ends_at_the_widest_width(us_net: TrainedClassifier) -> None:
    uneven = replace(us_net, settings=replace(TINY, low=0.26))
    assert uneven.widths[:2] == [0.26, 0.285]
    assert uneven.widths[-2:] == [0.985, 1.0]


def test_samples_below_two_are_refused(us_net: TrainedClassifier) -> None:
    for samples in (0, 1):
        with pytest.raises(aw.AnywidthError, match="samples"):
            us_net.calibrate([0.5], samples=samples)


def test_data_must_be_loaded_to_be_used(us_net: TrainedClassifier) -> None:
    bare = open_trained(us_net.run.folder, "cpu", with_data=False, settings=TINY)
    with pytest.raises(aw.AnywidthError, match="loaded"):
        bare.evaluate(bare.model)
