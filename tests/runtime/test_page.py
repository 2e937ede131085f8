"""The server's page in a real browser, for the three tasks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from served import Running, served
from task_bundles import CLASSES, classifier_bundle, policy_bundle, upscaler_bundle

PATIENCE = 30_000
FIVE_PER_SECOND = "() => Number(document.getElementById('read-rate').textContent) >= 5"
BARS_CHANGED = "text => document.querySelector('.bars').innerText !== text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def classifier_file(folder: Path) -> Path:
    return classifier_bundle(folder)


@pytest.fixture(scope="module")
def classifier(classifier_file: Path) -> Iterator[Running]:
    with served(classifier_file, deadline_ms=10_000) as running:
        yield running


@pytest.fixture
def visit(browser_page: Page) -> Callable[[Running], Page]:
    def go(running: Running) -> Page:
        browser_page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        browser_page.goto(f"http://127.0.0.1:{running.port}/")
        return browser_page

    return go


def photo(side: int = 40) -> dict[str, object]:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(file, "PNG")
    return {"name": "photo.png", "mimeType": "image/png", "buffer": file.getvalue()}


def test_the_dial_changes_width_numbers_and_prediction(
    classifier: Running, visit: Callable[[Running], Page]
) -> None:
    page = visit(classifier)
    expect(page.locator("#examples button")).to_have_count(3)
    expect(page.locator("#picture-name")).to_have_text("a shirt")
    bars = page.locator(".bars li")
    expect(bars).to_have_count(5)
    wide = page.locator(".bars").inner_text()
    dial = page.get_by_role("slider", name="Width")
    expect(page.locator("#read-width")).to_have_text("1.0")
    expect(page.locator("#read-accuracy")).to_have_text("99")
    dial.focus()
    dial.press("ArrowLeft")
    expect(page.locator("#read-width")).to_have_text("0.75")
    dial.press("Home")
    expect(page.locator("#read-width")).to_have_text("0.25")
    expect(page.locator("#read-accuracy")).to_have_text("96")
    macs = classifier.service.network.table[0].macs
    expect(page.locator("#read-macs")).to_have_text(f"{macs / 1000:.3g} k")
    expect(page.locator("#channels i.on")).to_have_count(10)
    expect(page.locator(".told")).to_contain_text("width 0.25")
    page.wait_for_function(BARS_CHANGED, arg=wide)
    names = {text.splitlines()[0] for text in bars.all_inner_texts()}
    assert names <= set(CLASSES)


def test_the_pointer_on_the_spectrum_tells_and_a_click_picks_a_width(
    classifier: Running, visit: Callable[[Running], Page]
) -> None:
    page = visit(classifier)
    dots = page.locator("#spectrum .dot")
    expect(dots).to_have_count(4)
    place = dots.nth(1).bounding_box()
    assert place is not None
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.mouse.move(x, y + 20)
    expect(page.locator(".told")).to_contain_text("width 0.5")
    page.mouse.click(x, y + 20)
    expect(page.locator("#read-width")).to_have_text("0.5")
    expect(page.get_by_role("slider", name="Width")).to_have_value("500")


def test_a_picture_of_ones_own_and_a_file_that_is_none(
    classifier: Running, visit: Callable[[Running], Page], tmp_path: Path
) -> None:
    page = visit(classifier)
    expect(page.locator(".bars li")).to_have_count(5)
    page.locator("#file").set_input_files(photo(1500))  # type: ignore[arg-type]
    expect(page.locator("#picture-name")).to_have_text("photo.png")
    expect(page.locator("#examples [aria-pressed=true]")).to_have_count(0)
    expect(page.locator("#message")).to_be_hidden()
    text = tmp_path / "text.png"
    text.write_text("no picture")
    page.locator("#file").set_input_files(text)
    expect(page.locator("#message")).to_contain_text("text.png")
    page.locator("#examples button").nth(1).click()
    expect(page.locator("#picture-name")).to_have_text("a shoe")
    expect(page.locator("#message")).to_be_hidden()


def test_holding_a_deadline_shows_the_governor_at_work(
    classifier: Running, visit: Callable[[Running], Page]
) -> None:
    page = visit(classifier)
    expect(page.locator(".bars li")).to_have_count(5)
    page.evaluate("window.performance.mark('load-test')")
    page.get_by_role("switch", name="Hold a deadline").check(force=True)
    dial = page.get_by_role("slider", name="Width")
    expect(dial).to_be_disabled()
    # The longest deadline: a busy machine is not what is tested.
    page.locator("#deadline").press("End")
    for _ in range(3):
        page.locator("#load").press("ArrowRight")
    expect(page.locator("#load-shown")).to_contain_text("per second")
    page.wait_for_function(FIVE_PER_SECOND)
    expect(page.locator("#read-in-time")).to_contain_text("%")
    assert page.locator("#history .in-time").count() >= 1
    answered = classifier.service.metrics.recent(60)
    assert len(answered) > 10
    page.get_by_role("switch", name="Hold a deadline").uncheck(force=True)
    expect(dial).to_be_enabled()
    expect(page.locator("#governed")).to_be_hidden()


def test_a_picture_is_enlarged(folder: Path, visit: Callable[[Running], Page]) -> None:
    with served(upscaler_bundle(folder)) as running:
        page = visit(running)
        expect(page.get_by_role("heading", name="Enlarge a picture")).to_be_visible()
        expect(page.locator(".note")).to_contain_text("24 x 24 pixels become 48 x 48")
        macs = page.locator("#read-macs")
        wide = macs.inner_text()
        page.get_by_role("slider", name="Width").press("Home")
        expect(page.locator("#read-width")).to_have_text("0.5")
        expect(macs).not_to_have_text(wide)
        page.get_by_role("slider", name="plain").press("End")
        plain = page.locator(".compare .plain").bounding_box()
        whole = page.locator(".compare").bounding_box()
        assert plain is not None
        assert whole is not None
        assert plain["width"] == pytest.approx(whole["width"], abs=1)
        page.locator("#file").set_input_files(photo(300))  # type: ignore[arg-type]
        expect(page.locator(".note")).to_contain_text("256 x 256 pixels become 512 x 512")


def test_a_policy_says_what_it_would_do(folder: Path, visit: Callable[[Running], Page]) -> None:
    with served(policy_bundle(folder)) as running:
        page = visit(running)
        expect(page.get_by_role("heading", name="What to do next")).to_be_visible()
        expect(page.locator(".bars li")).to_have_count(3)
        expect(page.locator(".note")).to_contain_text("points")
        before = page.locator(".bars").inner_text()
        page.locator("#examples button").nth(1).click()
        page.wait_for_function(BARS_CHANGED, arg=before)
        assert page.locator("#file").is_disabled()


def test_a_token_is_asked_for(classifier_file: Path, visit: Callable[[Running], Page]) -> None:
    with served(classifier_file, token="a secret") as running:
        page = visit(running)
        for given in ("wrong", "a secret"):
            field = page.locator("#token")
            expect(field).to_be_visible()
            field.fill(given)
            field.press("Enter")
        expect(page.locator(".bars li")).to_have_count(5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_and_is_legible(
    classifier: Running, visit: Callable[[Running], Page], scheme: str
) -> None:
    page = visit(classifier)
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": 360, "height": 640})
    expect(page.locator(".bars li").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    def brightness(selector: str, name: str) -> float:
        color = page.locator(selector).first.evaluate(f"one => getComputedStyle(one).{name}")
        return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / 765

    ground = brightness(".card", "backgroundColor")
    assert (ground > 0.5) == (scheme == "light")
    for selector, name in (("h2", "color"), (".faint", "color"), ("figure svg text", "fill")):
        assert abs(ground - brightness(selector, name)) > 0.3


def test_the_keyboard_reaches_everything(
    classifier: Running, visit: Callable[[Running], Page]
) -> None:
    page = visit(classifier)
    expect(page.locator(".bars li")).to_have_count(5)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.title"))
    assert {"file", "a shirt", "a shoe", "width", "hold"} <= set(reached)


def test_the_api_page_shows_the_addresses(
    classifier: Running, visit: Callable[[Running], Page]
) -> None:
    page = visit(classifier)
    page.get_by_role("link", name="API").click()
    expect(page.locator(".address")).to_have_count(7)
    expect(page.get_by_text("/v2/models/{model}/infer").first).to_be_visible()
    expect(page.locator("pre").nth(2)).to_contain_text("/v2/models/net/infer?deadline_ms=20")
