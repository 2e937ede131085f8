"""Studies: what they train, how it is measured, and what their pages say of it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import command, succeed
from tiny_study import SETTINGS, STUDY, TINY, read_classifier, tiny_jobs

import anywidth as aw
from anywidth.app.data.arrays import BUNDLED
from anywidth.app.runs.run import Run
from anywidth.app.runs.settings import to_json
from anywidth.app.studies.definitions import (
    AS_TRAINED,
    CALIBRATED,
    MOBILENET_V1,
    MOBILENET_V2,
    POST_STATISTICS,
    S_V1,
    STUDIES,
    US_V1,
)
from anywidth.app.studies.findings import V1
from anywidth.app.studies.measuring import _narrowed, measure, stage_groups
from anywidth.app.studies.paper import paper_errors
from anywidth.app.studies.processes import work_through
from anywidth.app.studies.reporting import facts_of, write_study
from anywidth.app.studies.study_parts import Network, Study
from anywidth.app.studies.study_recipes import DATA, study_recipe
from anywidth.app.studies.tables import collect
from anywidth.app.studies.trainings import jobs_of, read_class_count, read_fact, read_pieces
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.app.tasks.registry import open_trained
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.slimming.norm_statistics import norm_records, uncalibrated_allowed

TABLE = (0.25, 0.5, 0.75, 1.0)


# ---- what is trained and measured ----------------------------------------------------------------


CLASSIFIED = [study for study in STUDIES if study.task.name == "classification"]


@pytest.mark.parametrize("data", DATA["classification"])
def test_no_configuration_is_trained_twice(data: str, tmp_path: Path) -> None:
    recipes = {
        network.name: study_recipe(data, network, tmp_path)
        for network in (MOBILENET_V1, MOBILENET_V2)
    }
    jobs = jobs_of(CLASSIFIED, {study.name: 1 for study in CLASSIFIED}, recipes, tmp_path)
    assert len({job.name for job in jobs}) == len(jobs) == 34
    assert len({json.dumps(to_json(job.settings)) for job in jobs}) == len(jobs)
    main = jobs_of([STUDY["main"]], {"main": 2}, recipes, tmp_path)
    assert len(main) == 24
    balanced = jobs_of([STUDY["balanced-losses"]], {"balanced-losses": 2}, recipes, tmp_path)
    assert len(balanced) == 30
    assert {job.name for job in main} < {job.name for job in balanced}
    first = {job.name for job in main if job.settings.seed == 0}
    assert first < {job.name for job in jobs}
    kept = ("model", "epochs", "learning_rate", "weight_decay", "batch_size", "momentum", "cutout")
    kept += ("label_smoothing", "calibration_augmented", "total_stride", "strides")
    kinds = {tuple(getattr(job.settings, name) for name in kept) for job in jobs}
    assert len(kinds) == 2  # one form and one recipe of each network


@pytest.mark.parametrize("data", DATA["classification"])
@pytest.mark.parametrize("network", [MOBILENET_V1, MOBILENET_V2], ids=lambda one: one.name)
def test_recipes_of_classifiers_have_no_true_labels_for_narrow_widths(
    data: str, network: Network, tmp_path: Path
) -> None:
    settings = study_recipe(data, network, tmp_path)
    assert isinstance(settings, ClassificationSettings)
    assert (settings.truth, settings.weights) == (0.0, "paper")


def test_epochs_are_told_apart_where_networks_differ(tmp_path: Path) -> None:
    recipes = {
        network.name: study_recipe("cifar10", network, tmp_path)
        for network in (MOBILENET_V1, MOBILENET_V2)
    }
    study = STUDY["main"]
    jobs = jobs_of([study], {"main": 1}, recipes, tmp_path)
    both = facts_of(study, jobs, 1, "")["recipe"]
    assert "epochs 80 (mobilenet_v1) and 40 (mobilenet_v2), batches of 512" in both
    assert "share of it for the last layer 1.0 (mobilenet_v1) and 0.1 (mobilenet_v2)" in both
    both_ways = STUDY["drawn-widths"]
    jobs = jobs_of([both_ways], {"drawn-widths": 1}, recipes, tmp_path)
    facts = facts_of(both_ways, jobs, 1, "")
    assert facts["recipe"].startswith("epochs 80, batches of 512, learning rate 0.4, share")
    drawn = "drawn from 16 uniform configurations or drawn from all uniform configurations"
    assert facts["random widths"] == drawn
    alone = [replace(job, settings=replace(job.settings, method="i")) for job in jobs]
    assert "random widths" not in facts_of(both_ways, alone, 1, "")


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_networks_compared_draw_alike(study: Study) -> None:
    drawn = {
        dict(one.changes).get("lattice")
        for setting in study.settings
        for one in setting.trainings
        if "method" not in dict(one.changes)
    }
    assert len(drawn) == (2 if study.name in ("drawn-widths", "divisor", "search") else 1)


def test_every_line_with_numbers_of_the_paper_finds_them() -> None:
    for study in STUDIES:
        for setting in study.settings:
            if setting.paper is not None:
                table, name = setting.paper
                assert set(paper_errors(table, setting.network.name, name)) == set(
                    setting.network.widths
                )


def test_one_stage_of_five_is_narrowed() -> None:
    model = aw.models.mobilenet_v1(num_classes=10, in_channels=1, total_stride=32)
    plan = aw.plan(model, torch.randn(2, 1, 32, 32))
    groups = stage_groups(plan)
    assert [len(stage) for stage in groups] == [1, 2, 2, 6, 2]
    half = plan.resolve(0.5)
    narrowed = _narrowed(plan, groups[4], 0.5)
    for name, channels in narrowed.items():
        assert channels == (304 if name in groups[4] else half[name])  # 0.3 of 1024, by eights


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The US-Net of `bn-statistics` and the S-Net of `main`, trained and measured."""
    out = tmp_path_factory.mktemp("studies")
    jobs = tiny_jobs(STUDY["bn-statistics"], out)
    jobs += [
        job for job in tiny_jobs(STUDY["naturally-slimmable"], out) if job.training in (US_V1, S_V1)
    ]
    lines: list[str] = []
    assert work_through(jobs, report=lines.append)
    assert "3 trainings" in lines[0]
    return out


def test_measuring_leaves_the_run_as_trained(measured: Path) -> None:
    folder = measured / "runs" / "mobilenet_v1-us-seed-0"
    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    trained = open_trained(folder, "cpu", trust=True)
    again = measure(trained, CALIBRATED, MOBILENET_V1)["spectrum"]
    assert [p.width for p in again.points] == spectrum_widths(0.25, 1.0)
    assert again.points == read_classifier(folder, CALIBRATED).points
    assert {path: path.read_bytes() for path in folder.glob("*.safetensors")} == before
    assert not (folder / "checkpoints").exists()


def test_without_post_statistics_the_full_widths_are_cut(measured: Path) -> None:
    folder = measured / "runs" / "mobilenet_v1-us-seed-0"
    trained = open_trained(folder, "cpu", trust=True)
    found = read_classifier(folder, POST_STATISTICS["no post-statistics"][0])
    for record in norm_records(trained.model).values():
        record.bank.clear()
    for width in TABLE:
        with uncalibrated_allowed(trained.model), aw.at_width(trained.model, width):
            assert trained.evaluate(trained.model) == found.at(width).metrics
    exact = read_classifier(folder, POST_STATISTICS["exact over all"][0])
    assert any(exact.at(width).metrics != found.at(width).metrics for width in TABLE)


def test_an_s_net_is_measured_calibrated_between_its_switches_too(measured: Path) -> None:
    folder = measured / "runs" / "mobilenet_v1-s-seed-0"
    points = read_classifier(folder, CALIBRATED).points
    assert len(points) == 31
    own = measure(open_trained(folder, "cpu", trust=True), AS_TRAINED, MOBILENET_V1)["spectrum"]
    assert [point.width for point in own.points] == list(TABLE)


def test_more_images_than_there_are_means_all(measured: Path) -> None:
    """Only 200 images are trained on here, so 1k and 2k of them are all."""
    results = collect(STUDY["bn-statistics"], 1, measured)
    errors = {
        label: results.seeds((V1, label))[0].at(0.5).metrics["loss"] for label in POST_STATISTICS
    }
    assert errors["exact over 1k"] == errors["exact over all"] == errors["exact over 2k"]
    assert errors["moving over all"] == pytest.approx(errors["exact over all"], rel=0.2)


def test_the_page_counts_the_images_that_there_were(measured: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(measured, tmp_path / "study", ignore=shutil.ignore_patterns("*.safe*"))
    study = STUDY["bn-statistics"]
    jobs = tiny_jobs(study, copy)
    expected = (
        "*moving over all*: moving averages over 200 training images; "
        "*exact over all*: exact averages over 200 training images; "
        "*exact over 1k*: exact averages over 200 training images (1000 were asked for); "
        "*exact over 2k*: exact averages over 200 training images (2000 were asked for)"
    )
    assert facts_of(study, jobs, 1, "")["statistics"] == expected
    page, _ = write_study(study, jobs, 1, copy, "")
    assert f"- statistics: {expected}\n" in page.read_text()
    sliced = STUDY["naturally-slimmable"]
    one = facts_of(sliced, tiny_jobs(sliced, copy), 1, "")["statistics"]
    assert one == "exact averages over 100 training images"
    for path in copy.glob("runs/*/measurements/*.json"):  # as an older version wrote them
        data = json.loads(path.read_text())
        del data["images"]
        path.write_text(json.dumps(data))
    assert facts_of(study, jobs, 1, "")["statistics"] == expected


def test_the_page_says_where_networks_were_measured(measured: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(measured, tmp_path / "study", ignore=shutil.ignore_patterns("*.safe*"))
    study = STUDY["bn-statistics"]
    trained = facts_of(study, tiny_jobs(study, copy), 1, "")["device"]
    assert "measured" not in trained
    path = copy / "runs" / "mobilenet_v1-us-seed-0" / "measurements" / "exact-1k.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "a toaster"}))
    elsewhere = facts_of(study, tiny_jobs(study, copy), 1, "")["device"]
    assert elsewhere == f"{trained}; some measured on a toaster"


def test_the_page_says_that_time_is_missing_where_a_training_was_killed(
    measured: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(measured, tmp_path / "study", ignore=shutil.ignore_patterns("*.safe*"))
    study = STUDY["bn-statistics"]
    (job,) = tiny_jobs(study, copy)
    assert facts_of(study, [job], 1, "")["trainings"].endswith("minutes of one process in all")
    (piece,) = read_pieces(job.folder)
    killed = {**piece, "steps": 0, "seconds": 0.0, "killed": True}
    (job.folder / "pieces.json").write_text(json.dumps({"pieces": [killed, piece]}))
    found = facts_of(study, [job], 1, "")["trainings"]
    assert found.endswith(", without 1 piece that ended in a kill")


def test_findings_know_how_many_classes_and_images_there_were(measured: Path) -> None:
    (job,) = tiny_jobs(STUDY["bn-statistics"], measured)
    assert read_class_count(job) == 10
    data = open_trained(measured / "runs" / job.name, "cpu", trust=True).data
    assert data is not None
    found = {read_fact(job, one, "test_images") for one in job.measurements}
    assert found == {data.validation.samples}


@pytest.mark.parametrize("damage", ["no metrics", "no error", "no spectra", "cut short"])
def test_a_damaged_measurement_is_named_with_a_cure(
    measured: Path, tmp_path: Path, damage: str
) -> None:
    name = f"{CALIBRATED.name}.json"
    source = measured / "runs" / "mobilenet_v1-us-seed-0" / "measurements" / name
    data = json.loads(source.read_text())
    if damage == "no metrics":
        del data["spectra"]["spectrum"]["points"][0]["metrics"]
    elif damage == "no error":
        del data["spectra"]["spectrum"]["points"][0]["metrics"]["top1_error"]
    elif damage == "no spectra":
        data["spectra"] = 3
    path = tmp_path / "measurements" / source.name
    path.parent.mkdir()
    path.write_text(json.dumps(data)[: 100 if damage == "cut short" else None])
    with pytest.raises(aw.AnywidthError) as error:
        read_classifier(tmp_path, CALIBRATED)
    assert str(path) in str(error.value)


def test_trainings_of_an_older_version_are_taken(measured: Path, tmp_path: Path) -> None:
    """Their configuration lacks the fields that came later, which have their defaults then."""
    copy = shutil.copytree(measured, tmp_path / "study", ignore=shutil.ignore_patterns("*.safe*"))
    for path in copy.glob("runs/*/config.json"):
        data = json.loads(path.read_text())
        for name in ("strides", "label_smoothing", "calibration_augmented", "head_rate"):
            del data[name]
        path.write_text(json.dumps({**data, "version": 1}))
    options = ["--out", copy, *SETTINGS, "--device", "cpu", "--parallel", "1"]
    answer = succeed("study", "bn-statistics", *options, "--epochs", "1")
    assert "1 training, 1 " in answer.output
    assert not list(copy.glob("runs/*/model.safetensors"))


def test_another_training_in_the_folder_is_refused(measured: Path) -> None:
    options = ["--out", measured, *SETTINGS, "--device", "cpu", "--parallel", "1"]
    answer = command("study", "bn-statistics", *options, "--epochs", "2")
    assert answer.code == 2
    assert "epochs 1, not 2" in answer.errors
    assert "another folder" in answer.errors


def test_only_us_nets_mind_how_widths_are_drawn(tmp_path: Path) -> None:
    study = STUDY["main"]
    recipes = {
        network.name: study_recipe("bundled", network) for network in (MOBILENET_V1, MOBILENET_V2)
    }
    for job in jobs_of([study], {"main": 1}, recipes, tmp_path):
        Run.create(job.folder, replace(job.settings, lattice=4))
        if job.settings.method == "us":
            with pytest.raises(aw.AnywidthError, match="lattice"):
                job.missing()
        else:
            assert job.missing() == list(job.measurements)


def test_a_failing_training_loses_nothing(tmp_path: Path) -> None:
    """The data is moved after the first of three trainings."""
    study = STUDY["distillation"]
    changes = {**TINY, "data": "fashion_mnist"}
    right, wrong = (
        jobs_of(
            [study],
            {study.name: 1},
            {V1: study_recipe("bundled", MOBILENET_V1, folder, 1, "cpu", changes)},
            tmp_path,
        )
        for folder in (BUNDLED, tmp_path / "gone")
    )
    assert work_through(right[:1], report=lambda line: None)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    with pytest.raises(aw.AnywidthError, match="distill-false"):
        work_through(wrong, report=lambda line: None)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert work_through(right[:2], report=lambda line: None)


def test_weights_that_are_gone_are_named(measured: Path, tmp_path: Path) -> None:
    (job,) = tiny_jobs(STUDY["bn-statistics"], tmp_path)
    source = measured / "runs" / job.name
    (job.folder / "measurements").mkdir(parents=True)
    for name in ("config.json", "finished.json"):
        (job.folder / name).write_bytes((source / name).read_bytes())
    for measurement in job.measurements[1:]:
        path = f"measurements/{measurement.name}.json"
        (job.folder / path).write_bytes((source / path).read_bytes())
    with pytest.raises(aw.AnywidthError, match="moving-all"):
        work_through([job], report=lambda line: None)
    path = f"measurements/{job.measurements[0].name}.json"
    (job.folder / path).write_bytes((source / path).read_bytes())
    assert work_through([job], report=lambda line: None)


# ---- the command ---------------------------------------------------------------------------------


def test_a_process_that_cannot_write_its_log_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_bytes(b"")
    jobs = tiny_jobs(STUDY["bn-statistics"], tmp_path)
    before = dict(os.environ)
    with pytest.raises(aw.AnywidthError, match=r"us-seed-0\.txt"):
        work_through(jobs, parallel=2, report=lambda line: None)
    assert "Traceback" not in capfd.readouterr().err
    assert dict(os.environ) == before
