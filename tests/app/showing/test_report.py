"""The report page: self-contained, escaped, and with every number in it."""

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from anywidth.app.showing.figure_style import FAINT_INK, GRID, INK
from anywidth.app.showing.interactive_spectrum import interactive_spectrum
from anywidth.app.showing.report import Section, write_report
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

VOID = {"meta", "img", "br", "link", "input", "hr"}
NASTY = "<script>alert('x')</script> & \"more\""


class Page(HTMLParser):
    """Checks that tags close in order, and collects what tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.values: list[list[str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attributes)
        self.links += [
            str(value) for name, value in attributes if name in ("src", "href", "xlink:href")
        ]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.values.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.values[-1].append(named.get("data-value"))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def point(width: float, error: float, latency: float | None = 1.5) -> SpectrumPoint:
    metrics = {"top1_error": error, "loss": error / 10}
    return SpectrumPoint(
        width, ChannelConfig(()), int(4e7 * width**2), int(3e6 * width), metrics, latency
    )


US = Spectrum(
    "US-Net",
    (point(0.25, 10.5), point(0.5, 8.25), point(1.0, 7.0)),
    described=TrainedClassifier.metrics,
)
I_NETS = [Spectrum("I-Net", (point(0.25, error),), "i") for error in (11.0, 13.0)]
ROWS = [{"step": step, "loss/1.0": 1 / (step + 1), "loss/0.25": 2.0} for step in range(5)]


def test_the_page_holds_all_parts_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path,
        title="US-MobileNet v1",
        run_summary={"time": "4 min", "configuration": {"epochs": 10}, "versions": {"torch": "9"}},
        spectrum=US,
        baselines=I_NETS,
        metrics=ROWS,
        curves={"loss": "loss"},
        plan_text="3 of 4 layers",
    )
    page = Page(path.read_text())
    assert page.tags.count("svg") == 3
    assert page.tags.count("h1") == 1
    for text in (
        "Spectrum",
        "Latency",
        "Training",
        "Widths",
        "Run",
        "Plan",
        "3 of 4 layers",
        "configuration",
    ):
        assert text in page.text
    assert ["epochs", "10"] in page.rows
    assert ["time", "4 min"] in page.rows
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "default-src 'none'" in path.read_text()
    assert "@import" not in path.read_text()
    assert "url(http" not in path.read_text()


def test_the_table_has_every_width_with_numbers_to_sort_by(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, title="t", run_summary={}, spectrum=US, baselines=I_NETS)
    page = Page(path.read_text())
    assert page.rows[0] == [
        "width",
        "top-1 error, %",
        "loss",
        "multiply-adds",
        "parameters",
        "latency, ms",
        "I-Net, top-1 error, %",
    ]
    assert page.rows[1] == ["0.25", "10.50", "1.0500", "2.5 M", "750.0 k", "1.50", "12.00 ± 1.41"]
    assert page.values[1] == ["0.25", "10.5", "1.05", "2500000", "750000", "1.5", "12.0"]
    assert [row[0] for row in page.rows[1:4]] == ["0.25", "0.5", "1.0"]
    assert page.rows[2][-1] == "-"
    assert page.values[2][-1] == ""
    assert page.tags.count("button") == 7


def test_without_latency_or_curves_their_parts_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    untimed = Spectrum("US-Net", (point(0.5, 8.0, None), point(1.0, 7.0, None)))
    write_report(
        path, title="t", run_summary={}, spectrum=untimed, metrics=[{"step": 1, "rate": 0.1}]
    )
    page = Page(path.read_text())
    assert page.tags.count("svg") == 1
    assert "latency" not in page.text
    assert "<h2>Run</h2>" not in path.read_text()
    assert "Training" not in page.text


def test_whatever_is_handed_in_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    named = Spectrum(NASTY, US.points)
    odd = [
        SpectrumPoint(1.0, ChannelConfig(()), 5, 5, {"top1_error": 1.0, NASTY: 2.0}),
        SpectrumPoint(0.5, ChannelConfig(()), 3, 3, {"top1_error": 2.0, NASTY: 3.0}),
    ]
    write_report(
        path,
        title=NASTY,
        run_summary={NASTY: NASTY, "configuration": {NASTY: NASTY}},
        spectrum=Spectrum(NASTY, tuple(odd)),
        baselines=[named],
        plan_text=NASTY,
        metrics=[{"step": 1, f"loss/{NASTY}": 1.0}],
        extra_sections=[Section(NASTY, images={NASTY: b"\x89PNG..."}, caption=NASTY)],
    )
    page = Page(path.read_text())
    # The page's own: its script, and the data of its spectrum.
    assert page.tags.count("script") == 2
    assert page.text.count(NASTY) >= 10


def test_sections_of_a_task_come_with_their_pictures(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path,
        title="t",
        run_summary={},
        spectrum=US,
        extra_sections=[
            Section("Crops", images={"bicubic": b"\x89PNG one"}),
            Section("Crops", images={"ours": b"\x89PNG two"}),
            Section("Scores", html="<p><em>30.1</em> dB</p>"),
        ],
    )
    text = path.read_text()
    page = Page(text)
    assert text.count("<h2>Crops</h2>") == 1
    encoded = base64.b64encode(b"\x89PNG one").decode()
    assert f"data:image/png;base64,{encoded}" in page.links
    assert "<p><em>30.1</em> dB</p>" in text
    assert page.text.index("bicubic") < page.text.index("ours") < page.text.index("Scores")


def test_inline_plots_take_the_colours_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, title="t", run_summary={}, spectrum=US, metrics=ROWS)
    plots = "".join(re.findall(r"<svg.*?</svg>", path.read_text(), re.DOTALL))
    for color, name in ((INK, "ink"), (FAINT_INK, "faint"), (GRID, "line")):
        assert f"var(--{name})" in plots
        assert color not in plots
        assert f"--{name}:" in path.read_text()


def test_the_same_report_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, title="t", run_summary={}, spectrum=US, metrics=ROWS)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_without_points_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(AnywidthError, match="points"):
        write_report(path, title="t", run_summary={}, spectrum=Spectrum("empty", ()))
    assert list(tmp_path.iterdir()) == []


def test_widths_of_equal_channels_are_one_network_and_the_widest_names_the_last(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.html"
    channels = {0.25: 8, 0.275: 8, 0.975: 32, 1.0: 32}
    points = [
        SpectrumPoint(
            width, ChannelConfig((("a", count),)), 100 * count, count, {"top1_error": 7.0}
        )
        for width, count in channels.items()
    ]
    write_report(path, title="t", run_summary={}, spectrum=Spectrum("US-Net", tuple(points)))
    text = Page(path.read_text()).text
    assert "2networks" in text
    assert "1.0, 3.2 k" in text
    assert "0.25, 800" in text


def test_the_page_names_the_data_and_the_conditions_of_a_latency(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    measured = replace(
        US, measured_on="2,000 test images", latency_by="onnxruntime", latency_on="a CPU, 1 thread"
    )
    write_report(path, title="t", run_summary={}, spectrum=measured)
    text = Page(path.read_text()).text
    assert "on 2,000 test images." in text
    assert "onnxruntime, batch size 1, a CPU, 1 thread" in text


def test_a_standard_error_that_is_not_known_leaves_the_data_readable() -> None:
    metrics = {"score": 1.0, "score_standard_error": math.nan}
    points = (SpectrumPoint(1.0, ChannelConfig(()), 5, 5, metrics),)
    assert "NaN" not in interactive_spectrum([Spectrum("PPO", points)], "score", "")


def test_one_width_is_one_width(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for points, said in (
        ((point(0.25, 11.0),), "1network "),
        (US.points, "3networks "),
    ):
        write_report(path, title="t", run_summary={}, spectrum=Spectrum("net", points, "i"))
        assert said in Page(path.read_text()).text


def test_a_control_that_squeezes_the_others_waits_to_be_switched_on() -> None:
    control = Spectrum("sliced", (point(0.25, 90.0), point(1.0, 7.0)), "control")
    near = Spectrum("near", (point(0.25, 11.0), point(1.0, 7.5)), "control")
    markup = interactive_spectrum([US, control, near], "top1_error", "<figure></figure>")
    data = json.loads(markup.partition(">")[2].partition("</script>")[0])
    assert [one["isHidden"] for one in data["series"]] == [False, True, False]
    assert "width 0.25" in data["series"][0]["points"][0]["told"]


def test_a_name_cannot_end_the_data_of_the_spectrum() -> None:
    nasty = Spectrum(NASTY, US.points)
    markup = interactive_spectrum([nasty], "top1_error", "")
    assert markup.count("</script>") == 1
    assert (
        json.loads(markup.partition(">")[2].partition("</script>")[0])["series"][0]["name"] == NASTY
    )
