"""What a classification run starts with, and how it is optimised."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from command_line import TINY_RUN, assert_refused, command, succeed
from tiny_networks import images_and_labels, tiny
from torch import Tensor, nn

import anywidth as aw
from anywidth.app.runs.loop import scheduled_rate
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.checkpoint_start import read_weights
from anywidth.app.tasks.classification.networks import build_model
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.classification.task import train_run
from anywidth.errors import AnywidthError
from anywidth.files import load_tensors, save_tensors
from anywidth.planning.trace.residual_norms import residual_scales

SETTINGS = ClassificationSettings(model="tiny_networks:tiny", divisor=4, device="cpu")
SHAPE = (1, 28, 28)


@pytest.fixture
def trained() -> nn.Module:
    """A network as an ordinary training leaves it."""
    torch.manual_seed(1)
    model = tiny()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for seed in range(3):
        model(images_and_labels(16, seed)[0])
    return model.eval()


def started(path: Path, **changes: Any) -> nn.Module:
    settings = replace(SETTINGS, from_checkpoint=str(path), **changes)
    return build_model(settings, 10, SHAPE, is_new=True).eval()


# ---- from a checkpoint ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "plain", "nested", "wrapped", "old"])
def test_every_form_of_file_is_read(form: str, trained: nn.Module, tmp_path: Path) -> None:
    path, weights = tmp_path / "net", trained.state_dict()
    if form == "safetensors":
        save_tensors(path, weights)
    elif form == "plain":
        torch.save(weights, path)
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": weights}, path)
    elif form == "wrapped":
        torch.save({"model": {f"module.{n}": t for n, t in weights.items()}}, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=False)
    found = read_weights(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


def test_a_run_starts_as_the_checkpoint_with_important_channels_first(
    trained: nn.Module, tmp_path: Path
) -> None:
    save_tensors(tmp_path / "net", trained.state_dict())
    images = images_and_labels(4)[0]
    kept, sorted_ = started(tmp_path / "net", sort_channels=False), started(tmp_path / "net")
    with torch.no_grad():
        torch.testing.assert_close(kept(images), trained(images))
        torch.testing.assert_close(sorted_(images), trained(images))
    assert torch.equal(kept[0].weight, trained[0].weight)
    makes = sorted_[0].weight.flatten(1).norm(dim=1) / sorted_[0].weight.norm()
    reads = sorted_[4].weight.transpose(0, 1).flatten(1).norm(dim=1) / sorted_[4].weight.norm()
    importance = (makes.square() + reads.square()).detach()
    assert (importance[:-1] >= importance[1:] - 1e-6).all()


def test_only_a_new_run_reads_the_file(trained: nn.Module, tmp_path: Path) -> None:
    file, run = tmp_path / "net", tmp_path / "run"
    save_tensors(file, trained.state_dict())
    options = (*TINY_RUN, "--from-checkpoint", file, "--no-report", "--learning-rate", "1e-9")
    succeed("train", *options, "--out", run)
    kept = load_tensors(run / "model.safetensors")[0]
    start = started(file).state_dict()
    torch.testing.assert_close(kept["0.weight"], start["0.weight"])
    file.unlink()
    succeed("calibrate", run, "--trust", "--widths", "0.5", "--device", "cpu")
    again = ("--from-checkpoint", run / "model.safetensors", "--out", tmp_path / "again")
    assert_refused(command("train", *TINY_RUN, "--no-report", *again), "no-sort-channels")
    assert not (tmp_path / "again").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def damage(name: str, weights: dict[str, Tensor], path: Path) -> None:
    if name == "lacks":
        save_tensors(path, {n: t for n, t in weights.items() if n != "4.weight"})
    elif name == "shape":
        save_tensors(path, {**weights, "9.bias": torch.zeros(3)})
    elif name == "unknown":
        save_tensors(path, {**weights, "head.extra": torch.zeros(3)})
    elif name == "nan":
        save_tensors(path, {**weights, "9.bias": torch.full((10,), torch.nan)})
    elif name == "code":
        path.write_bytes(pickle.dumps({"0.weight": Evil()}, protocol=2))
    elif name == "numbers":
        torch.save({"epoch": 3}, path)
    elif name == "cut":
        torch.save(weights, path)
        path.write_bytes(path.read_bytes()[:-100])
    elif name == "text":
        path.write_text("hello")
    elif name == "slimmable":
        aw.save(build_model(SETTINGS, 10, SHAPE), path)


@pytest.mark.parametrize(
    ("name", "word"),
    [("lacks", "lacking: 4.weight"), ("shape", r"9.bias \(3,\) instead of \(10,\)"),
     ("unknown", "head.extra"), ("nan", "9.bias"), ("code", "tensors alone"),
     ("numbers", "state_dict"), ("cut", "net"), ("text", "net"), ("slimmable", "slimmable already"),
     ("missing", "net")],
)  # fmt: skip
def test_bad_files_are_named(
    name: str, word: str, trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(name, trained.state_dict(), tmp_path / "net")
    with pytest.raises(AnywidthError) as error:
        started(tmp_path / "net")
    assert re.search(word, str(error.value))
    assert not (tmp_path / "executed").exists()


def test_settings_that_contradict_are_named(tmp_path: Path) -> None:
    settings = replace(SETTINGS, from_checkpoint="net")
    with pytest.raises(AnywidthError, match="zero-gamma"):
        replace(settings, zero_gamma=True).check()
    with pytest.raises(AnywidthError, match="from-run"):
        replace(settings, from_run="run").check()
    with pytest.raises(AnywidthError, match="fewer channels"):
        replace(settings, method="i", width=0.5).check()
    assert settings.anchored().from_checkpoint == str(Path("net").absolute())


# ---- residual branches ---------------------------------------------------------------------------


def test_the_last_norm_of_each_branch_is_found() -> None:
    images = torch.randn(2, 3, 32, 32)
    layers = [1, 2, 1, 1]
    resnet = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, layers)
    expected = [f"layer{i}.{b}.bn2.weight" for i, n in enumerate(layers, 1) for b in range(n)]
    assert residual_scales(resnet, (images,)) == expected
    v2 = aw.models.mobilenet_v2(10)
    blocks = [f"features.{i}" for i, b in enumerate(v2.features) if getattr(b, "has_residual", 0)]
    names = residual_scales(v2, (images,))
    assert [".".join(name.split(".")[:2]) for name in names] == blocks
    assert all(name.endswith("layers.2.1.weight") for name in names)
    assert residual_scales(aw.models.mobilenet_v1(10), (images,)) == []


def test_branches_start_at_zero() -> None:
    settings = replace(SETTINGS, model="mobilenet_v2", zero_gamma=True, low=0.35)
    model = build_model(settings, 10, SHAPE, is_new=True)
    zeros = [name for name, one in model.named_parameters() if "weight" in name and not one.any()]
    assert len(zeros) == 10
    assert all(
        p.any() for n, p in build_model(settings, 10, SHAPE).named_parameters() if n in zeros
    )
    with pytest.raises(AnywidthError, match="no residual"):
        build_model(replace(SETTINGS, zero_gamma=True), 10, SHAPE, is_new=True)


# ---- schedule and clipping -----------------------------------------------------------------------


def test_a_cosine_falls_later_and_then_faster() -> None:
    line, cosine = (
        [scheduled_rate(step, 100, 10, 1.0, kind) for step in range(100)]
        for kind in ("linear", "cosine")
    )
    assert line[:10] == cosine[:10]
    assert line[10] == cosine[10] == 1
    assert line[55] == pytest.approx(cosine[55]) == pytest.approx(0.5)
    assert cosine[30] > line[30]
    assert 0 < cosine[95] < line[95]


def test_schedule_and_clipping_reach_the_training(tmp_path: Path) -> None:
    def kept(name: str, **changes: Any) -> Tensor:
        settings = replace(SETTINGS, limit=60, batch_size=20, epochs=2, **changes)
        assert train_run(Run.create(tmp_path / name, settings), settings)
        return load_tensors(tmp_path / name / "model.safetensors")[0]["0.weight"]

    plain = kept("plain")
    assert torch.equal(kept("again", gradient_clip=1e9), plain)
    start = build_model(SETTINGS, 10, SHAPE).state_dict()["0.weight"]
    assert (kept("clipped", gradient_clip=1e-6) - start).abs().max() < 1e-3
    assert not torch.equal(kept("cosine", schedule="cosine"), plain)
