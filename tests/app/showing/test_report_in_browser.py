"""The report page in a real browser: it looks as it should, sorts its table, and loads nothing."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page

from anywidth.app.showing.report import Section, write_report
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig

NASTY = "<img src='http://example.invalid/x.png'><script>document.title='taken'</script>"


def point(width: float, error: float) -> SpectrumPoint:
    macs, parameters = int(4e7 * width**2), int(3e6 * width)
    metrics = {"top1_error": error, "top1_error_standard_error": 0.5}
    times = 2 * width, (1.9 * width, 2.4 * width)
    return SpectrumPoint(width, ChannelConfig(()), macs, parameters, metrics, *times)


# At width 0.5 the error is smallest, and nothing is known of the middle by the I-Nets.
US = Spectrum("US-Net", (point(0.25, 10.5), point(0.5, 6.25), point(1.0, 7.0)))
I_NETS = [Spectrum("I-Net", (point(width, error),), "i") for width, error in ((0.25, 9), (1, 11))]
ROWS = [{"step": step, "loss/1.0": 1 / (step + 1), "loss/0.25": 2.0} for step in range(5)]


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(
        path,
        title="US-MobileNet v1",
        run_summary={"time": "4 min", "settings": {"data_dir": NASTY}},
        spectrum=US,
        baselines=I_NETS,
        metrics=ROWS,
        curves={"loss": "loss"},
        plan_text="3 of 4 layers\n" * 100,
        extra_sections=[
            Section("Crops", images={"bicubic\n24.10 dB": png(40, 30)}, caption="a crop")
        ],
    )
    return path


@pytest.fixture
def report(browser_page: Page, written: Path) -> Page:
    browser_page.goto(written.as_uri())
    return browser_page


def spectrum(page: Page) -> Locator:
    return page.locator(".spectrum-data + figure").first


def column(page: Page, number: int) -> list[str]:
    return page.locator(f".scroll tbody td:nth-child({number})").all_inner_texts()


def test_the_page_is_drawn_and_runs_nothing_that_a_run_was_named(report: Page) -> None:
    assert report.title() == "US-MobileNet v1"
    sections = ["Spectrum", "Latency", "Training", "Crops", "Widths", "Run", "Plan"]
    assert report.locator("h2").all_inner_texts() == sections
    report.get_by_text("settings", exact=True).click()
    assert report.get_by_text(NASTY).is_visible()
    for plot in report.locator("figure svg").all():
        box = plot.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 200
    size = "image => [image.naturalWidth, image.naturalHeight]"
    assert report.locator("img").evaluate(size) == [40, 30]


def test_the_pointer_on_the_spectrum_tells_the_width(report: Page) -> None:
    dots = spectrum(report).locator(".dot")
    assert dots.count() == 5
    told = spectrum(report).locator(".told")
    for number, words in (
        (1, ("US-Net", "width 0.5", "6.25 ± 0.50")),
        (4, ("I-Net", "width 1.0", "11.00 ± 0.50")),
    ):
        place = dots.nth(number).bounding_box()
        assert place is not None
        report.mouse.move(place["x"] + 5, place["y"] + 5)
        assert all(word in told.inner_text() for word in words)
    report.mouse.move(1, 1)
    assert told.inner_text() == ""


def test_baselines_are_switched_off_and_on(report: Page) -> None:
    dots = spectrum(report).locator(".dot")
    switch = report.get_by_role("button", name="I-Net", exact=True)
    assert switch.get_attribute("aria-pressed") == "true"
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert dots.count() == 3
    switch.press("Enter")
    assert dots.count() == 5
    # One series stays: an empty plot says nothing.
    for name in ("I-Net", "US-Net"):
        report.get_by_role("button", name=name, exact=True).click()
    assert dots.count() == 3


def test_without_scripts_the_spectrum_is_still_drawn(browser: Browser, written: Path) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(written.as_uri())
        for figure in page.locator(".spectrum-data + figure svg").all():
            box = figure.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) > 200


def test_a_press_on_a_heading_sorts_and_another_turns_it_round(report: Page) -> None:
    assert column(report, 1) == ["0.25", "0.5", "1.0"]
    error = report.locator("thead th").nth(1)
    error.get_by_role("button").click()
    assert error.get_attribute("aria-sort") == "ascending"
    assert column(report, 2) == ["6.25 ± 0.50", "7.00 ± 0.50", "10.50 ± 0.50"]
    error.get_by_role("button").press("Enter")
    assert error.get_attribute("aria-sort") == "descending"
    assert column(report, 1) == ["0.25", "1.0", "0.5"]


def test_what_is_unknown_stays_last_whichever_way_is_sorted(report: Page) -> None:
    heading = report.locator("thead th").last
    heading.get_by_role("button").click()
    assert column(report, 1) == ["0.25", "1.0", "0.5"]
    heading.get_by_role("button").click()
    assert column(report, 1) == ["1.0", "0.25", "0.5"]
    assert report.locator("th[aria-sort]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_by_day_and_night(report: Page, scheme: str) -> None:
    report.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]

    def brightness(selector: str, name: str) -> float:
        color = report.locator(selector).first.evaluate(f"one => getComputedStyle(one).{name}")
        return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / 765

    ground = brightness("section", "backgroundColor")
    assert (ground > 0.5) == (scheme == "light")
    assert abs(ground - brightness("h2", "color")) > 0.5
    assert abs(ground - brightness("figure svg text", "fill")) > 0.3


def test_a_telephone_scrolls_the_table_not_the_page(report: Page) -> None:
    report.set_viewport_size({"width": 360, "height": 640})
    assert report.evaluate("document.documentElement.scrollWidth") <= 360
    cells = report.locator(".scroll td")
    heights = cells.evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
    assert max(heights) < 40  # a value and its standard error stay on one line


def test_a_telephone_shows_training_curves_and_labels_of_crops_in_readable_letters(
    report: Page,
) -> None:
    report.set_viewport_size({"width": 360, "height": 640})
    heights = "all => all.map(one => one.getBoundingClientRect().height)"
    letters = report.locator(".panels svg text").evaluate_all(heights)
    assert len(letters) > 5
    assert min(letters) > 9
    assert report.locator(".pictures figcaption").inner_text() == "bicubic\n24.10 dB"


def test_bars_and_an_axis_that_noise_does_not_fill(report: Page, tmp_path: Path) -> None:
    assert spectrum(report).locator(".bar").count() == 5
    times = report.locator(".spectrum-data + figure").nth(1)
    assert times.locator(".bar").count() == 3
    assert "0" in times.locator("text").all_text_contents()
    flat = [point(0.25, 10.2), point(0.5, 10.0), point(1.0, 10.1)]
    path = tmp_path / "flat.html"
    write_report(path, title="t", run_summary={}, spectrum=Spectrum("US-Net", tuple(flat)))
    report.goto(path.as_uri())
    dots = spectrum(report).locator(".dot").all()
    heights = [box["y"] for dot in dots if (box := dot.bounding_box()) is not None]
    whole = spectrum(report).locator("svg").bounding_box()
    assert whole is not None
    assert 0 < max(heights) - min(heights) < 0.1 * whole["height"]
