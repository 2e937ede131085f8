"""Folders of runs that anyone may have changed: one clear line, or the same answer as before."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Answer, assert_refused, command, succeed
from finished_runs import classifier_run
from mutations import damaged, mutated, refusal
from PIL import Image

from anywidth.app.runs.metrics import read_metrics
from anywidth.app.runs.run import Run
from anywidth.app.tasks.results import saved_spectrum
from anywidth.files import load_tensors, save_tensors
from anywidth.json_values import checksum_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    Image.linear_gradient("L").resize((12, 12)).save(folder / "grey.png")
    return classifier_run(folder / "run", [0.25, 0.5, 1.0])


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def predicted(run: Path, whole: Path) -> Answer:
    image = whole.parent / "grey.png"
    return command("predict", run, image, "--width", "0.5", "--trust", "--device", "cpu")


def assert_clear(answer: Answer, truth: Answer, what: str) -> None:
    """One line, or the answer of the run as it was."""
    if answer.code == 0:
        assert answer.output == truth.output, what
        return
    assert answer.code == 2, (what, answer)
    (line,) = answer.errors.strip().splitlines()
    assert line.startswith("anywidth: "), what
    assert len(line) < 1000, what


# ---- fuzzing -------------------------------------------------------------------------------------


def test_changed_settings_never_give_another_answer(run: Path, whole: Path) -> None:
    truth, path = predicted(run, whole), run / "config.json"
    for what, changed in mutated(json.loads(path.read_text()), random.Random(0), 40):
        path.write_text(json.dumps(changed))
        assert_clear(predicted(run, whole), truth, what)


def test_a_changed_record_never_gives_another_answer(run: Path, whole: Path) -> None:
    truth, path = predicted(run, whole), run / "finished.json"
    for what, changed in mutated(json.loads(path.read_text()), random.Random(0), 20):
        path.write_text(json.dumps(changed))
        assert_clear(predicted(run, whole), truth, what)


def test_a_record_without_its_checksum_is_read_by_its_schema(run: Path, whole: Path) -> None:
    """A value of the right type can only be believed; any other is refused."""
    path = run / "finished.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    refused = 0
    for what, changed in mutated(data, random.Random(1), 20):
        path.write_text(json.dumps(changed))
        answer = predicted(run, whole)
        refused += answer.code != 0
        assert "nan" not in answer.output, what
        assert_clear(answer, answer, what)
    assert refused > 8


def test_damaged_weights_are_never_evaluated(run: Path) -> None:
    path = run / "model.safetensors"
    truth = load_tensors(path)[0]
    for what, changed in damaged(path.read_bytes(), random.Random(0), 300):
        path.write_bytes(changed)
        refused, found = refusal(load_tensors, path)
        if found is None:
            assert str(path) in str(refused), what
        else:  # blanks in the header may change and mean the same
            assert found[0].keys() == truth.keys(), what
            assert all(torch.equal(found[0][name], truth[name]) for name in truth), what


def manifest_of(run: Path) -> Path:
    (path,) = run.glob("checkpoints/*/manifest.json")
    return path


def test_changed_checkpoints_are_refused(run: Path) -> None:
    """Also if whoever changed the manifest wrote a checksum that fits."""
    tensors = {"model": {"weight": torch.ones(3)}}
    Run.open(run, writing=True).save_checkpoint(3, tensors, {"optimizer": {"dict": [["lr", 0.1]]}})
    path = manifest_of(run)
    data = json.loads(path.read_text())
    chance = random.Random(0)
    for what, changed in mutated(data, chance, 200):
        if chance.random() < 0.5:
            rest = {name: value for name, value in changed.items() if name != "sha256"}
            changed = {**rest, "sha256": checksum_of(rest)}
        path.write_text(json.dumps(changed))
        refused, found = refusal(Run.open(run).load_checkpoint)
        if found is None:
            assert str(run) in str(refused), what
        else:
            assert isinstance(found.step, int), what
            assert isinstance(found.state, dict), what


def damaged_rows(run: Path) -> Callable[[], Any]:
    (run / "metrics.csv").write_text("step,loss\n1,2.5\n2,2.25\n")
    return lambda: read_metrics(run / "metrics.csv")


def damaged_spectrum(run: Path) -> Callable[[], Any]:
    point = {"width": 0.5, "channels": {"0": 8}, "macs": 10, "parameters": 3, "latency_ms": None}
    points = [{**point, "metrics": {"top1_error": 8.5, "loss": 0.1}}]
    data = {"version": 1, "name": "US", "kind": "us", "points": points, "latency_by": None}
    (run / "spectrum.json").write_text(json.dumps(data))
    return lambda: saved_spectrum(Run.open(run))


@pytest.mark.parametrize(
    ("name", "reader"), [("metrics.csv", damaged_rows), ("spectrum.json", damaged_spectrum)]
)
def test_damaged_results_are_named(
    run: Path, name: str, reader: Callable[[Path], Callable[[], object]]
) -> None:
    read, path = reader(run), run / name
    for what, changed in damaged(path.read_bytes(), random.Random(0), 300):
        path.write_bytes(changed)
        refused, _ = refusal(read)
        assert refused is None or str(run) in refused, what


def test_changed_spectra_are_read_by_a_schema(run: Path) -> None:
    read, path = damaged_spectrum(run), run / "spectrum.json"
    for what, changed in mutated(json.loads(path.read_text()), random.Random(0), 300):
        path.write_text(json.dumps(changed))
        refused, found = refusal(read)
        assert refused is None or str(path) in refused, what
        points = [] if found is None else found.points
        assert all(isinstance(point.macs, int) for point in points), what


# ---- each defect ---------------------------------------------------------------------------------


def changed_state(run: Path, **state: Any) -> None:
    path = run / "finished.json"
    data = json.loads(path.read_text())
    data["state"] |= state
    path.write_text(json.dumps({**data, "sha256": checksum_of(data["state"])}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("classes", 7),
        ("classes", []),
        ("classes", [1] * 10),
        ("input_shape", None),
        ("input_shape", [1, 12]),
        ("input_shape", [1, 10**9, 10**9]),
        ("mean", "x"),
        ("mean", [0.1, 0.2]),
        ("std", [0]),
        ("std", [float("nan")]),
    ],
)
def test_a_field_of_a_finished_run_is_checked(
    run: Path, whole: Path, field: str, value: Any
) -> None:
    changed_state(run, **{field: value})
    assert_refused(predicted(run, whole), "finished.json")


@pytest.mark.parametrize("part", ["model", "statistics"])
@pytest.mark.parametrize("damage", ["nan", "integers"])
def test_weights_and_statistics_are_numbers(run: Path, whole: Path, part: str, damage: str) -> None:
    path = run / f"{part}.safetensors"
    tensors, about = load_tensors(path)
    name = next(name for name in tensors if name.endswith("running_mean"))
    tensors[name] = tensors[name] / 0 if damage == "nan" else tensors[name].int()
    save_tensors(path, tensors, about)
    assert_refused(predicted(run, whole), name.rpartition("/")[2].partition(".")[0], str(run))


def test_an_answer_of_nan_is_an_error(run: Path, whole: Path) -> None:
    """Weights that are finite, but overflow."""
    path = run / "model.safetensors"
    tensors, about = load_tensors(path)
    save_tensors(path, {n: t * 1e30 if t.is_floating_point() else t for n, t in tensors.items()})
    assert about == {}
    assert_refused(predicted(run, whole), "NaN")


def test_settings_edited_after_training_are_named(run: Path, whole: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"average_outputs": false', '"average_outputs": true'))
    assert_refused(predicted(run, whole), "average_outputs", str(path))


def test_a_run_whose_data_moved_may_say_so_in_its_settings(run: Path, whole: Path) -> None:
    path = run / "config.json"
    path.write_text(path.read_text().replace('"data_dir": null', '"data_dir": "/elsewhere"'))
    assert predicted(run, whole).code == 0


def test_statistics_that_do_not_fit_are_named_with_their_file(run: Path, whole: Path) -> None:
    path = run / "statistics.safetensors"
    tensors, about = load_tensors(path)
    save_tensors(path, tensors, {"widths": about["widths"].replace('"ready": true', '"ready": 1')})
    assert_refused(predicted(run, whole), str(path))


def test_left_over_files_of_a_kill_are_removed(run: Path) -> None:
    (run / "plots").mkdir()
    left = [run / "plots" / ".spectrum.png.0a1b2c3d.tmp", run / ".spectrum.json.0a1b2c3d.tmp"]
    exporting = run / ".net.anywidth.0a1b2c3d.tmp"
    for path in (*left, exporting):
        path.write_bytes(b"half")
    succeed("calibrate", run, "--trust", "--device", "cpu", "--samples", "20", "--widths", "1.0")
    assert not any(path.exists() for path in left)
    assert exporting.exists(), "another process may be writing it"
