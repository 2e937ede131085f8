"""Studies: what their tables, figures and findings say of made-up numbers."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from anywidth.app.showing.figure_style import style, write_figures
from anywidth.app.studies.comparing import Finding, Results, Verdict, compare, judge, margin
from anywidth.app.studies.definitions import MOBILENET_V1, MOBILENET_V2, STUDIES
from anywidth.app.studies.figures import study_figure
from anywidth.app.studies.findings import BALANCED, HALF_TRUE, V1, excess_error
from anywidth.app.studies.paper import paper_errors
from anywidth.app.studies.tables import to_csv, to_markdown
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.measuring.width_lists import spectrum_widths
from anywidth.width import ChannelConfig

TABLE = (0.25, 0.5, 0.75, 1.0)
STUDY = {study.name: study for study in STUDIES}


def made_up(errors: Mapping[float, float], name: str = "", macs: int = 1000) -> Spectrum:
    points = tuple(
        SpectrumPoint(
            width,
            ChannelConfig(()),
            round(macs * width),
            10,
            {"top1_error": error, "top5_error": 1.0, "loss": 0.5},
        )
        for width, error in errors.items()
    )
    return Spectrum(name, points)


def results_of(levels: Mapping[str, list[float]], network: str = V1, low: float = 0.25) -> Results:
    """Settings whose error is the same at all widths; a number for each seed."""
    widths = spectrum_widths(low, 1.0)
    return Results(
        {
            (network, label): {
                seed: made_up(dict.fromkeys(widths, error), label)
                for seed, error in enumerate(errors)
            }
            for label, errors in levels.items()
        },
        {},
    )


# ---- words and numbers ---------------------------------------------------------------------------


def test_a_comparison_reads_well_in_both_directions() -> None:
    results = results_of({"one": [10.0, 10.2, 10.4], "other": [10.5, 10.6, 10.7]})
    # The differences are 0.3, 0.4 and 0.5, and Student's t is 2.92 for three.
    better = compare("One is better", results, V1, "one", "other", TABLE)
    assert better == Finding(
        Verdict.HOLDS,
        "One is better: the error of one is 0.40 points below that of other, mean over widths "
        "0.25, 0.5, 0.75 and 1.0 (± 0.17, 3 seeds).",
    )
    worse = compare("Other is better", results, V1, "other", "one", [0.25])
    assert worse == Finding(
        Verdict.FAILS,
        "Other is better: the error of other is 0.40 points above that of one, at width 0.25 "
        "(± 0.17, 3 seeds).",
    )
    assert str(worse).startswith("**Does not hold.** Other is better")
    alone = compare("Same", results_of({"a": [7.0], "b": [7.0]}), V1, "a", "b", TABLE)
    assert "equal" in alone.text
    assert "(one seed)" in alone.text


def test_seeds_are_compared_pair_by_pair() -> None:
    """The seeds differ by points, the settings by a tenth in each of them: no doubt is left."""
    results = results_of({"one": [10.0, 15.0, 12.0], "other": [10.1, 15.1, 12.1]})
    found = compare("One is better", results, V1, "one", "other", TABLE)
    assert found.verdict is Verdict.HOLDS
    assert "0.10 points below" in found.text
    assert "± 0.00, 3 seeds" in found.text


def test_what_the_seeds_leave_open_is_called_open() -> None:
    assert judge([-1.0, 1.5]) is Verdict.OPEN
    assert judge([-1.4, -1.5]) is Verdict.HOLDS
    assert judge([1.4, 1.5]) is Verdict.FAILS
    assert judge([0.1]) is Verdict.FAILS
    assert judge([0.1], limit=0.2) is Verdict.HOLDS


def test_a_verdict_is_95_percent_certain() -> None:
    """Student's t decides: a standard deviation from the limit is not enough with few seeds."""
    three = [-0.17, -1.43, -2.3]  # -1.30 with a standard deviation of 1.07
    assert judge(three, limit=-0.2) is Verdict.OPEN
    assert judge(three * 3, limit=-0.2) is Verdict.HOLDS
    assert margin(three) == pytest.approx(2.920 * statistics.stdev(three) / 3**0.5)
    assert margin([-1.0, -1.5]) == pytest.approx(6.314 * 0.25)
    # Beyond ten seeds the quantile stays that of ten, which is a little too strict.
    assert margin([0.0, 1.0] * 10) == pytest.approx(1.833 * 0.513 / 20**0.5, rel=0.01)


def test_one_seed_says_no_more_than_its_test_images_can() -> None:
    """Two error rates near 10 %, of 10,000 images each, have a standard error of 0.43 points."""
    levels = results_of({"one": [10.0], "other": [10.6], "third": [10.8]})
    results = Results(levels.spectra, {}, test_images=10_000)
    close = compare("Better", results, V1, "one", "other", TABLE)
    assert close.verdict is Verdict.OPEN
    assert "(one seed, ± 0.71 by the number of test images)" in close.text
    assert compare("Better", results, V1, "one", "third", TABLE).verdict is Verdict.HOLDS
    assert compare("Better", results, V1, "third", "one", TABLE).verdict is Verdict.FAILS
    same = compare("Better", results, V1, "one", "other", TABLE, noise=0.0)
    assert same.verdict is Verdict.HOLDS
    assert "(one seed)" in same.text
    assert compare("Better", levels, V1, "one", "other", TABLE).verdict is Verdict.HOLDS
    seeds = Results(results_of({"one": [10.0, 10.1], "other": [10.2, 10.3]}).spectra, {}, None, 100)
    assert compare("Better", seeds, V1, "one", "other", TABLE).verdict is Verdict.HOLDS


def test_the_paper_is_quoted_where_it_has_numbers() -> None:
    results = results_of({"I-Net": [10.0], "S-Net": [10.0], "US-Net": [9.0]})
    paper = {
        (V1, label): paper_errors("main", V1, label.lower())
        for label in ("I-Net", "S-Net", "US-Net")
    }
    results = Results(results.spectra, paper)
    found = compare("Better", results, V1, "US-Net", "I-Net", TABLE)
    assert "(one seed; paper: 2.20 below)" in found.text
    assert "; paper: 0.90 below" in compare("", results, V1, "US-Net", "I-Net", [1.0]).text
    assert "paper" not in compare("", results, V1, "US-Net", "I-Net", [0.3]).text


# Errors with which all of a study's findings hold; turned over, none does.
AS_IN_THE_PAPER = {
    "sampling-rule": {"3 random": 0, "min + 2 random": -1, "max + 2 random": 1,
                      "min + 1 random + max": -2},
    "distillation": {"inplace distillation": -1, "true labels alone": 0, "half true labels": 0},
    "bn-statistics": {"moving over all": 1, "exact over all": 0, "exact over 1k": -1,
                      "exact over 2k": -1, "no post-statistics": 8},
    "lower-bound": {"k0 = 0.25": 0, "k0 = 0.35": -1, "k0 = 0.05": 1},
    "divisor": {"d = 8": -1, "d = 1": 0},
    "number-of-widths": {"n = 3": 1, "n = 4": 0, "n = 5": 1},
    "naturally-slimmable": {"US-Net": 0, "S-Net": 6, "sliced I-Net 1.0": 6},
    "output-averaging": {"US-Net": 0, "output averaging": -1},
    "nonuniform": {"trained uniform": 1, "uniform": 0, "stage 1": -2, "stage 2": 1, "stage 3": 1,
                   "stage 4": 1, "stage 5": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", AS_IN_THE_PAPER)
def test_findings_follow_the_numbers(name: str) -> None:
    study = STUDY[name]
    levels = AS_IN_THE_PAPER[name]
    assert set(levels) == {setting.label for setting in study.settings}
    for sign, verdict in ((1, Verdict.HOLDS), (-1, Verdict.FAILS)):
        results = results_of({label: [50 + sign * level] for label, level in levels.items()})
        found = study.find(results)
        assert [finding.verdict for finding in found] == [verdict] * len(found), found


@pytest.mark.parametrize("name", AS_IN_THE_PAPER)
def test_networks_that_learned_nothing_prove_nothing(name: str) -> None:
    study = STUDY[name]
    labels = [setting.label for setting in study.settings]
    guessing = results_of({label: [89.5] for label in labels})
    found = study.find(Results(guessing.spectra, {}, classes=10))
    assert [finding.verdict for finding in found] == [Verdict.OPEN] * len(found)
    assert all("guessing" in finding.text for finding in found)
    # The same numbers are no guesses among 100 classes.
    found = study.find(Results(guessing.spectra, {}, classes=100))
    assert Verdict.OPEN not in {finding.verdict for finding in found}


def test_one_network_at_chance_is_worse_than_one_that_learned() -> None:
    results = results_of({"one": [60.0], "other": [90.0]})
    results = Results(results.spectra, {}, classes=10)
    assert compare("", results, V1, "one", "other", TABLE).verdict is Verdict.HOLDS
    assert compare("", results, V1, "other", "one", TABLE).verdict is Verdict.FAILS


def test_findings_of_a_search_follow_the_numbers() -> None:
    for searched, drawn, verdict in ((9.0, 9.1, Verdict.HOLDS), (9.9, 10.3, Verdict.FAILS)):
        levels = {"uniform": [10.0], "searched": [searched], "uniform, 500": [10.0],
                  "searched, 500": [drawn]}  # fmt: skip
        both = {
            (network, label): {0: made_up(dict.fromkeys((0.5, 0.7), values[0]), label)}
            for network in (MOBILENET_V1.name, MOBILENET_V2.name)
            for label, values in levels.items()
        }
        found = STUDY["search"].find(Results(both, {}))
        assert len(found) == 6
        assert {finding.verdict for finding in found} == {verdict}


def test_findings_of_the_main_table_follow_the_numbers() -> None:
    for error, verdict in ((9.0, Verdict.HOLDS), (11.0, Verdict.FAILS)):
        levels = {"I-Net": [10.0], "S-Net": [10.0], "US-Net": [error]}
        levels[BALANCED] = [error + (error - 10) / 2]
        levels[HALF_TRUE] = [error + (error - 10)]
        both = {**results_of(levels).spectra, **results_of(levels, MOBILENET_V2.name, 0.35).spectra}
        for study, count in (("main", 8), ("balanced-losses", 18)):
            found = STUDY[study].find(Results(both, {}))
            assert len(found) == count
            assert {finding.verdict for finding in found} == {verdict}


def test_stages_are_compared_at_the_same_multiply_adds() -> None:
    uniform = made_up({0.25: 30.0, 0.5: 20.0, 1.0: 10.0})
    # Halfway between 500 and 1000 multiply-adds the uniform network has an error of 15.
    assert excess_error(made_up({0.75: 17.0}), uniform) == pytest.approx(2.0)
    assert excess_error(made_up({0.5: 17.0, 0.75: 16.0}), uniform) == pytest.approx(-1.0)
    assert excess_error(made_up({0.1: 99.0, 0.5: 21.0}), uniform) == pytest.approx(1.0)


def test_tables_put_the_papers_numbers_below_ours() -> None:
    study = STUDY["lower-bound"]
    spectra = {
        (V1, setting.label): {
            seed: made_up(dict.fromkeys(spectrum_widths(low, 1.0), 10.0 + 2 * seed), setting.label)
            for seed in (0, 1)
        }
        for setting, low in zip(study.settings, (0.25, 0.35, 0.05), strict=True)
    }
    results = Results(spectra, {(V1, "k0 = 0.25"): paper_errors("main", V1, "us-net")})
    page = to_markdown(study, results, {"command": "`anywidth study`"}, study.find(results))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    ours = "11.00 ± 1.41"
    assert rows[0] == ["", "0.05", "0.25", "0.35", "0.5", "0.75", "1.0", "mean from 0.35"]
    assert rows[2][:4] == ["multiply-adds", "50", "250", "350"]
    assert rows[3] == ["k0 = 0.25", "-", *[ours] * 6]
    printed = ["*44.3*", "", "*35.8*", "*30.5*", "*28.2*", ""]
    assert rows[4] == ["*paper, ImageNet*", "", *printed]
    assert rows[5] == ["k0 = 0.35", "-", "-", *[ours] * 5]
    assert rows[6] == ["k0 = 0.05", *[ours] * 7]
    assert "Figure 7 of the paper" in page
    assert "- **Does not hold.** Training down to 0.05" in page
    assert "- **Holds.** Training down to 0.35" in page
    lines = list(csv.DictReader(to_csv(results).splitlines()))
    assert len(lines) == 2 * (31 + 27 + 39)
    assert lines[0]["paper_top1_error"] == "44.3"
    assert lines[0]["multiply_adds"] == "250"


def test_a_width_that_fails_stands_out() -> None:
    study = STUDY["drawn-widths"]
    smooth = {0.25: 9.0, 0.3: 8.0, 0.325: 7.5, 1.0: 5.0}
    spectra = {(V1, one.label): {0: made_up(smooth, one.label)} for one in study.settings}
    found = study.find(Results(spectra, {}))
    assert [one.verdict for one in found] == [Verdict.FAILS, Verdict.HOLDS]
    spectra[V1, "n = 5, 16"] = {0: made_up(smooth | {0.325: 19.0}, "")}
    found = study.find(Results(spectra, {}))
    assert [one.verdict for one in found] == [Verdict.HOLDS, Verdict.HOLDS]
    assert "n = 5, 16 at 0.325 is 11.00" in found[0].text
    spectra[V1, "n = 4, all"] = {0: made_up(smooth, ""), 1: made_up(smooth | {0.3: 15.0}, "")}
    found = study.find(Results(spectra, {}))
    assert [one.verdict for one in found] == [Verdict.HOLDS, Verdict.FAILS]
    assert "n = 4, all at 0.3 is 6.00" in found[1].text
    guesses = {
        (V1, one.label): {0: made_up({0.25: 90.0, 0.5: 89.9, 1.0: 90.1}, "")}
        for one in study.settings
    }
    found = study.find(Results(guesses, {}, classes=10))
    assert [one.verdict for one in found] == [Verdict.OPEN, Verdict.OPEN]
    assert "guessing" in found[0].text


@pytest.mark.parametrize("name", ["main", "divisor"])
def test_figures_show_the_spread_of_the_seeds(name: str, tmp_path: Path) -> None:
    study = STUDY[name]
    labels = {setting.label for setting in study.settings}
    picture = study.figures()[0]
    drawn = []
    for spread in (0.0, 1.0):
        levels = {label: [10.0, 10.0 + spread] for label in labels}
        results = results_of(levels)
        write_figures(tmp_path / picture.file, partial(study_figure, picture, results))
        assert (tmp_path / f"{picture.file}.png").exists()
        drawn.append((tmp_path / f"{picture.file}.svg").read_text())
    assert drawn[0] != drawn[1]
    assert all(label in drawn[0] for label in picture.labels)


def test_the_whole_spread_is_on_the_axis() -> None:
    picture = STUDY["main"].figures()[0]
    with style():
        figure = study_figure(picture, results_of({"US-Net": [10.0, 50.0], "I-Net": [9.0, 11.0]}))
    low, high = figure.axes[0].get_ylim()
    # Bars that end on the frame would look cut.
    assert low < 9.0 - 0.02 * 41
    assert high > 50.0 + 0.02 * 41
