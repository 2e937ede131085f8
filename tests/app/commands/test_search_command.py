"""`anywidth search` on runs of all tasks, and what takes the channels that it finds."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import anywidth_runtime
import pytest
import torch
from command_line import (
    HANGS_AFTER,
    TINY_RUN,
    assert_refused,
    command,
    environment,
    start,
    succeed,
    torchrun,
)
from finished_runs import policy_run, upscaler_run

import anywidth as aw
from anywidth.app.studies.definitions import MOBILENET_V1, SEARCHED
from anywidth.app.studies.measuring import measure
from anywidth.app.tasks.registry import open_trained
from anywidth.app.tasks.search_run import channels_file
from anywidth.app.tasks.trained import Trained
from anywidth.files import write_json
from anywidth.searching.latency_table import fitted_table, latency_devices
from anywidth.searching.probes import probe_configs

FOR_SEARCH = (*TINY_RUN, "--nonuniform", "--held-out", "0.2", "--no-report")


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    succeed("train", *FOR_SEARCH, "--out", folder)
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_once, tmp_path / "run")


def search(run: Path, *options: object) -> str:
    answer = command("search", run, "--device", "cpu", "--trust", *options)
    assert answer.code == 0, answer.errors
    return answer.output + answer.errors


def opened(run: Path) -> Trained:
    return open_trained(run, "cpu", with_data=False, trust=True)


def test_channels_for_each_budget(run: Path) -> None:
    said = search(run, "--macs", "60k,30k")
    for name, most in (("60k", 60e3), ("30k", 30e3)):
        channels = json.loads((run / f"search/channels-{name}.json").read_text())
        config = aw.ChannelConfig.from_json(channels)
        assert aw.macs(opened(run).model, config) <= most
    result = json.loads((run / "search/search.json").read_text())
    assert result["about"]["remarks"] == []
    assert "kept out of training" in result["about"]["judged_on"]
    found = aw.SearchResult.from_json(result)
    for one in found.found:
        assert one.best.metrics["loss"] <= one.uniform.metrics["loss"]
    assert found.front[0].cost > found.front[-1].cost
    assert "loss" in said
    assert "kept out of training" in said
    for suffix in ("png", "svg"):
        assert (run / f"search/search.{suffix}").stat().st_size > 1000


def test_budgets_that_look_alike_have_files_of_their_own() -> None:
    names = [channels_file(aw.Budget("macs", amount)) for amount in (40e3, 1234567, 1234999)]
    assert names == ["channels-40k.json", "channels-1.234567M.json", "channels-1.234999M.json"]
    times = [channels_file(aw.Budget("milliseconds", amount)) for amount in (0.12, 0.1201)]
    assert times == ["channels-0.12ms.json", "channels-0.1201ms.json"]


def test_two_searches_do_not_write_into_one_folder(run: Path) -> None:
    holder = "import sys, pathlib; from anywidth.app.runs.folder_lock import lock_folder\n"
    holder += "lock = lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    (run / "search").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", holder, run / "search"],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        answer = command("search", run, "--trust", "--device", "cpu", "--macs", "40k")
        other.communicate("\n")
    assert_refused(answer, "another search", "--out")


def test_the_same_seed_gives_the_same_files(run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        search(run, "--parameters", "1k", "--method", "evolution", "--out", tmp_path / name)
    first, second = (json.loads((tmp_path / n / "search.json").read_text()) for n in ("a", "b"))
    assert first == second
    assert (tmp_path / "a/channels-1k-parameters.json").is_file()


def test_a_run_that_was_trained_otherwise_is_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "uniform"
    succeed("train", *TINY_RUN, "--epochs", "1", "--no-report", "--out", run)
    said = search(run, "--macs", "60k")
    assert "--nonuniform" in said
    assert "--held-out" in said


def test_images_that_judge_are_neither_trained_nor_tested_with(run: Path) -> None:
    trained = open_trained(run, "cpu", trust=True)
    judged = {images.tobytes() for batch, _ in trained.data.judging for images in batch.numpy()}
    for loader in (trained.data.calibration, trained.data.validation):
        others = {images.tobytes() for batch, _ in loader for images in batch.numpy()}
        assert not judged & others
    assert len(judged) > 500


def test_a_killed_search_goes_on(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    search(run, "--macs", "40k", "--out", out)
    expected = json.loads((out / "search.json").read_text())
    notes = json.loads((out / "notes.json").read_text())
    kept = dict(list(notes["known"].items())[:6])
    (out / "notes.json").write_text(json.dumps({**notes, "known": kept}))
    search(run, "--macs", "40k", "--out", out, "--resume")
    resumed = json.loads((out / "search.json").read_text())
    assert resumed["passes"] == expected["passes"] - 6
    assert resumed["found"] == expected["found"]
    refused = command("search", run, "--trust", "--macs", "40k", "--resume", "--out", tmp_path)
    assert_refused(refused, "--resume")


def test_two_ranks_find_what_one_process_finds(run: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--trust", "--macs", "40k", "--method", "evolution")
    said = search(run, *options, "--out", tmp_path / "one")
    done = torchrun("-m", "anywidth", "search", run, *options, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / n / "search.json").read_text()) for n in ("one", "two"))
    assert one == two
    assert done.stdout.count("Judged on") == said.count("Judged on") == 1


def test_ctrl_c_keeps_what_was_found(run: Path) -> None:
    """Evolution of many generations, so that there is time to stop it."""
    process = start("search", run, "--trust", "--device", "cpu", "--macs", "40k,30k,20k",
                    "--method", "evolution")  # fmt: skip
    deadline = time.monotonic() + HANGS_AFTER
    while not (run / "search/notes.json").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert (run / "search/channels-20k.json").is_file()


def test_channels_are_taken_by_the_other_commands(run: Path, tmp_path: Path) -> None:
    search(run, "--macs", "40k")
    channels = run / "search/channels-40k.json"
    config = aw.ChannelConfig.from_json(json.loads(channels.read_text()))
    said = succeed("spectrum", run, "--trust", "--device", "cpu", "--widths", "0.25,1.0",
                   "--channels", channels, "--no-latency").output  # fmt: skip
    assert "nonuniform" in said
    points = json.loads((run / "spectrum.json").read_text())["points"]
    assert [point["width"] for point in points] == [0.25, 1.0, None]
    assert points[2]["channels"] == config.to_json()
    succeed("report", run, "--trust", "--device", "cpu")
    succeed("export", run, "--trust", "--channels", channels, "--out", tmp_path / "small.pt2")
    small = torch.export.load(tmp_path / "small.pt2").module()
    count = sum(p.numel() for p in small.state_dict().values())
    assert count < aw.parameter_count(opened(run).model, 1.0)
    bundle = tmp_path / "net.anywidth"
    succeed("export", run, "--trust", "--channels", channels, "--widths", "1.0", "--out", bundle)
    assert set(anywidth_runtime.open(bundle).widths) == {1.0, "channels-40k"}


def test_a_searched_network_is_trained_alone_or_fine_tuned(run: Path, tmp_path: Path) -> None:
    search(run, "--macs", "40k")
    channels, alone = run / "search/channels-40k.json", tmp_path / "alone"
    options = (*TINY_RUN, "--epochs", "1", "--channels", channels)
    succeed("train", *options, "--out", alone)
    config = aw.ChannelConfig.from_json(json.loads(channels.read_text()))
    model = opened(alone).model
    assert dict(aw.plan_of(model).full.items()) == dict(config.items())
    channels_before = channels.read_text()
    channels.unlink()  # a run does not need the file again
    said = succeed("spectrum", alone, "--trust", "--device", "cpu", "--no-latency").output
    assert "own channels" in said
    channels.write_text(channels_before)
    # So small a rate that the weights stay those of the run.
    tuned = tmp_path / "tuned"
    succeed("train", *options, "--from-run", run, "--learning-rate", "1e-12", "--weight-decay", "0",
            "--no-report", "--out", tuned)  # fmt: skip
    extracted = aw.extract(_calibrated(run, config), config)
    expected = dict(extracted.named_parameters())
    for name, parameter in opened(tuned).model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=0)


def _calibrated(run: Path, config: aw.ChannelConfig) -> torch.nn.Module:
    trained = open_trained(run, "cpu", trust=True)
    trained.calibrate([config])
    return trained.model


def test_budgets_in_milliseconds_keep_a_table(run: Path, tmp_path: Path) -> None:
    model = opened(run).model
    plan = aw.plan_of(model)
    times = {config: 1e-6 * plan.macs(config) for config in probe_configs(plan)}
    table = fitted_table(plan, times, latency_devices(model)[0])
    least, most = (table.predict(plan.resolve(width)) for width in (0.25, 1.0))
    path = tmp_path / "table.json"
    table.save(path)
    milliseconds = f"{1000 * (least + most) / 2:.6f}us"
    said = search(run, "--latency", milliseconds, "--latencies", path)
    assert "costs are measured" in said
    data = json.loads(path.read_text())
    write_json(path, {**data, "device": "abacus"})
    refused = command("search", run, "--trust", "--latency", milliseconds, "--latencies", path)
    assert_refused(refused, "abacus", "--other-device")
    said = search(run, "--latency", milliseconds, "--latencies", path, "--other-device")
    assert "predicted" in said
    write_json(path, {**data, "network": "other"})
    refused = command("search", run, "--trust", "--latency", milliseconds, "--latencies", path)
    assert_refused(refused, "network")


def test_a_study_searches_a_run(run: Path) -> None:
    found = measure(open_trained(run, "cpu", trust=True), SEARCHED, MOBILENET_V1)
    assert found.keys() == {"uniform", "searched"}
    for uniform, searched in zip(found["uniform"].points, found["searched"].points, strict=True):
        assert uniform.width == searched.width
        assert searched.macs <= uniform.macs


def test_super_resolution_is_judged_by_psnr(tmp_path: Path) -> None:
    run = upscaler_run(tmp_path / "sr", nonuniform=True)
    model = opened(run).model
    assert len(aw.plan_of(model).elastic()) == 3
    most = int(0.5 * aw.parameter_count(model, 1.0))
    said = search(run, "--parameters", most)
    assert "PSNR" in said
    assert "patches of 12 training pictures that it was trained with" in said
    plain = upscaler_run(tmp_path / "plain")
    refused = command("search", plain, "--device", "cpu", "--parameters", most)
    assert_refused(refused, "--nonuniform")


def test_a_searched_upscaler_is_trained_alone(tmp_path: Path) -> None:
    channels, run = tmp_path / "channels.json", tmp_path / "sr"
    counts = {"head": 6, "body.0.widen": 20, "body.1.widen": 32}
    source = upscaler_run(tmp_path / "source", nonuniform=True)
    full = aw.plan_of(opened(source).model).full
    write_json(channels, full.replace(counts).to_json())
    options = ("--blocks", "2", "--epochs", "1", "--steps-per-epoch", "2", "--batch-size", "2",
               "--patch", "16", "--device", "cpu", "--no-report", "--channels", "8")  # fmt: skip
    succeed("train", "sr", *options, "--own-channels", channels, "--out", run)
    model = opened(run).model
    assert {name: aw.plan_of(model).full[name] for name in counts} == counts


def test_games_are_judged_by_the_score(tmp_path: Path) -> None:
    run = policy_run(tmp_path / "rl", "gym:CartPole-v1", evaluation_games=2, longest_game=20)
    most = int(0.3 * aw.parameter_count(opened(run).model, 1.0))
    said = search(run, "--parameters", most)
    assert "score" in said
    assert "games" in said


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ((), "--macs"),
        (("--macs", "40k", "--parameters", "1k"), "one of"),
        (("--macs", "5ms"), "5ms"),
        (("--latency", "5"), "5ms"),
        (("--macs", "1"), "narrowest"),
        (("--macs", "1G"), "widest"),
        (("--macs", "40k", "--other-device"), "--latency"),
        (("--probes", "probes.onnx"), "anywidth"),
    ],
)
def test_bad_input_is_named(trained_once: Path, tmp_path: Path, options, word: str) -> None:
    answer = command(
        "search", trained_once, "--trust", "--device", "cpu", "--out", tmp_path, *options
    )
    assert_refused(answer, word)


def test_a_run_that_is_not_finished_is_refused(run: Path) -> None:
    (run / "finished.json").unlink()
    assert_refused(command("search", run, "--trust", "--macs", "40k"), "finished")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "JSON"),
        ("[3]", "channels"),
        ('{"0": "many"}', "channels"),
        ('{"0": 16, "elsewhere": 3}', "another network"),
        ('{"0": 1, "4": 16, "9": 10}', "trained with"),
        ('{"found": []}', "channels-"),
    ],
)
def test_files_that_hold_no_channels_of_the_network(
    trained_once: Path, tmp_path: Path, content: str, word: str
) -> None:
    path = tmp_path / "channels.json"
    path.write_text(content)
    for command_and_options in (("spectrum", trained_once, "--no-latency"),
                                ("export", trained_once, "--out", tmp_path / "x.pt2")):  # fmt: skip
        assert_refused(command(*command_and_options, "--trust", "--channels", path), word)


def test_channels_and_a_width_contradict_each_other(trained_once: Path, tmp_path: Path) -> None:
    path = tmp_path / "channels.json"
    write_json(path, {"0": 8, "4": 8, "9": 10})
    answer = command("predict", trained_once, path, "--trust", "--width", "0.5", "--channels", path)
    assert_refused(answer, "only one")
    options = ("--channels", path, "--method", "s", "--out", tmp_path / "x")
    assert_refused(command("train", *TINY_RUN, *options), "--method")


def test_channels_of_a_run_with_other_settings_name_the_way_to_take_these(tmp_path: Path) -> None:
    path = tmp_path / "channels.json"
    write_json(path, {"elsewhere": 8})
    answer = command("train", *TINY_RUN, "--channels", path, "--out", tmp_path / "x")
    assert_refused(answer, "--config RUN/config.json")
