"""The studies of super-resolution and reinforcement learning: records, findings, real trainings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import command, succeed

from anywidth.app.studies.comparing import Results, Verdict
from anywidth.app.studies.definitions import STUDIES
from anywidth.app.studies.findings import reinforcement, super_resolution
from anywidth.app.tasks.registry import task_named
from anywidth.files import read_json
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

STUDY = {study.name: study for study in STUDIES}
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PLAIN = "US-Net, no distillation"

Values = Mapping[tuple[str, float], float]
"""(label, width) → value of the main metric."""


def results_of(task: str, network: str, *seeds: Values, error: float | None = None) -> Results:
    metrics = task_named(task).trained.metrics
    name = next(iter(metrics))
    spectra: dict[tuple[str, str], dict[int, Spectrum]] = {}
    for seed, values in enumerate(seeds):
        for label in dict.fromkeys(label for label, _ in values):
            points = [
                SpectrumPoint(
                    width,
                    ChannelConfig(()),
                    round(1000 * width),
                    10,
                    {name: value} | ({} if error is None else {f"{name}_standard_error": error}),
                )
                for (one, width), value in values.items()
                if one == label
            ]
            spectra.setdefault((network, label), {})[seed] = Spectrum(label, tuple(points))
    return Results(spectra, {}, described=metrics)


# ---- findings ------------------------------------------------------------------------------------


def of_wdsr(gain: float, loss: float = 0.0) -> dict[tuple[str, float], float]:
    """A US-Net that is better by `gain` than without distillation, and I-Nets."""
    return {
        (label, width): 34 + width + difference
        for label, difference in (("I-Net", loss), ("US-Net", gain), (PLAIN, 0.0))
        for width in (0.5, 1.0)
    }


def test_super_resolution_findings_follow_the_numbers() -> None:
    found = super_resolution(results_of("super_resolution", "wdsr", of_wdsr(0.06, 0.08)))
    expected = [Verdict.HOLDS] * 2 + [Verdict.FAILS] * 2 + [Verdict.HOLDS]
    assert [one.verdict for one in found] == expected
    assert "PSNR of US-Net is 0.0200 dB below that of I-Net, at width 0.5" in found[0].text
    assert "0.0600 dB above" in found[4].text


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(-0.0004, Verdict.OPEN), (0.04, Verdict.OPEN), (0.06, Verdict.HOLDS), (-0.06, Verdict.FAILS)],
)
def test_small_gains_of_one_seed_are_open(gain: float, verdict: Verdict) -> None:
    found = super_resolution(results_of("super_resolution", "wdsr", of_wdsr(gain)))
    assert found[-1].verdict is verdict


def test_gains_of_several_seeds_are_compared_with_their_spread() -> None:
    seeds = [of_wdsr(gain) for gain in (0.01, 0.02, 0.03)]
    found = super_resolution(results_of("super_resolution", "wdsr", *seeds))[-1]
    assert found.verdict is Verdict.HOLDS
    assert "0.0200 dB above" in found.text
    assert "± 0.0169, 3 seeds" in found.text


def of_ppo(gain: float) -> dict[tuple[str, float], float]:
    widths = (0.25, 0.5, 0.75, 1.0)
    return {
        (label, width): 83.5 + difference
        for label, difference in (("US-Net", gain), ("I-Net", 0.0))
        for width in widths
    }


@pytest.mark.parametrize(
    ("gain", "verdict"), [(8.0, Verdict.OPEN), (8.5, Verdict.HOLDS), (-8.5, Verdict.FAILS)]
)
def test_scores_within_their_margin_are_open(gain: float, verdict: Verdict) -> None:
    error = 5 / 2**0.5  # of the difference: 5, and the margin is 1.645 times that
    found = reinforcement(results_of("reinforcement", "atari_cnn", of_ppo(gain), error=error))
    assert [one.verdict for one in found] == [verdict] * 4
    assert "± 8.2 by the number of games" in found[0].text


def test_equal_scores_are_not_higher() -> None:
    found = reinforcement(results_of("reinforcement", "atari_cnn", of_ppo(0.0)))
    assert [one.verdict for one in found] == [Verdict.FAILS] * 4


# ---- records -------------------------------------------------------------------------------------

RECORDED = {
    "pictures": (
        "super_resolution.json",
        ["super-resolution", "--data", "pictures", "--data-dir", "TRAIN", "--epochs", "6"],
        {
            "i-0.5": "I-Net",
            "i-1.0": "I-Net",
            "us-l1-truth": "US-Net, l1 distillation and truth",
            "us-l1": "US-Net, l1 distillation",
            "us-no-distillation": PLAIN,
        },
    ),
    "atari": (
        "reinforcement.json",
        ["reinforcement", "--data", "atari", "--set", "steps=3000000", "--set", "environments=16",
         "--set", "rollout=64", "--set", "curve_games=8"],
        {},
    ),
    "minatar": (
        "reinforcement_minatar.json",
        ["reinforcement", "--seeds", "3", "--set", "evaluation_games=100"],
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_page_written_again_has_the_numbers_of_its_record(name: str, tmp_path: Path) -> None:
    """The records of older versions are folders of studies now; nothing is trained."""
    file, arguments, labels = RECORDED[name]
    out = tmp_path / "study"
    shutil.copytree(RESULTS / "studies" / name / "runs", out / "runs")
    answer = succeed("study", *arguments, "--out", out)
    trained = len(list((out / "runs").iterdir()))
    assert f"{trained} trainings, {trained} of them done" in answer.output
    before = read_json(RESULTS / file)["rows"]
    study = STUDY[arguments[0]]
    rows = (out / f"{study.name}.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(row["width"] is not None for row in before)
    for row in before:
        if row["width"] is None:
            continue
        metrics = row.get("metrics") or {key: row[key] for key in row if "score" in key}
        label = labels.get(row["network"], row["network"])
        start = f"{study.settings[0].network.name},"
        place = f"{row.get('seed', 0)},{row['width']},{row['multiply_adds']},{row['parameters']}"
        (line,) = [
            one
            for one in rows
            if one.startswith((f'{start}"{label}"', f"{start}{label},")) and f",{place}," in one
        ]
        assert line.endswith(",".join(str(round(v, 5)) for v in metrics.values()) + ",")
    for kind in ("md", "csv"):
        committed = RESULTS / "studies" / name / f"{study.name}.{kind}"
        ours = (out / committed.name).read_text().splitlines()
        theirs = committed.read_text().splitlines()
        assert [one for one in ours if not one.startswith("- command")] == [
            one for one in theirs if not one.startswith("- command")
        ]


def test_networks_measured_on_other_pictures_are_not_compared(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "studies" / "pictures" / "runs", tmp_path / "runs")
    path = tmp_path / "runs" / "wdsr-us-distill-none-seed-0" / "measurements" / "spectrum.json"
    data = json.loads(path.read_text())
    data["bicubic"]["psnr"] += 1
    path.write_text(json.dumps(data))
    answer = command("study", *RECORDED["pictures"][1], "--out", tmp_path)
    assert answer.code == 2
    assert "wdsr-us-distill-none-seed-0" in answer.errors
    assert "pictures" in answer.errors


# ---- trained here --------------------------------------------------------------------------------

TINY_WDSR = {"steps_per_epoch": 1, "channels": 4, "blocks": 1, "validation_pictures": 1,
             "warmup_steps": 0, "batch_size": 1}  # fmt: skip
TINY_PPO = {"steps": 32, "environments": 2, "rollout": 16, "batch_size": 16, "validate_every": 1,
            "curve_games": 1, "evaluation_games": 2, "longest_game": 10,
            "warmup_updates": 0}  # fmt: skip


def options(changes: Mapping[str, int]) -> list[str]:
    return [text for name, value in changes.items() for text in ("--set", f"{name}={value}")]


def test_super_resolution_is_trained_and_measured(tmp_path: Path) -> None:
    arguments = ["super-resolution-l2", "--epochs", "1", *options(TINY_WDSR), "--out", tmp_path]
    answer = succeed("study", *arguments, "--device", "cpu", "--parallel", "1")
    assert "the PSNR of US-Net is" in answer.output
    page = (tmp_path / "super-resolution-l2.md").read_text()
    assert "- bicubic upscaling: psnr 23.44, ssim 0.8023" in page
    assert (tmp_path / "super-resolution-l2.png").exists()
    again = succeed("study", *arguments, "--device", "cpu", "--parallel", "1")
    assert "4 trainings, 4 of them done" in again.output


def test_policies_are_trained_and_measured(tmp_path: Path) -> None:
    arguments = ["reinforcement", *options(TINY_PPO), "--out", tmp_path, "--device", "cpu"]
    answer = succeed("study", *arguments, "--parallel", "1")
    assert "the score of US-Net is" in answer.output
    page = (tmp_path / "reinforcement.md").read_text()
    for label in ("US-Net", "I-Net", "I-Net 1.0, sliced"):
        assert f"| {label} |" in page
    assert "reinforcement-curves.png" in page
    assert (tmp_path / "reinforcement-curves.svg").exists()
