"""Settings for every test: one thread, the same random numbers each time; and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from browser import FLAGS, MISSING, Watched, find_chromium
from hypothesis import HealthCheck, settings

from anywidth.app.data.arrays import load_arrays

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Threads that wait for each other on busy cores take several times as long.
torch.set_num_threads(1)

# The same examples each time, however long one takes on a busy machine.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def images_unpacked_once() -> Iterator[None]:
    """For modules that train many times on the bundled images, which take long to unpack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anywidth.app.data.classification.load_arrays", cache(load_arrays))
        yield


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# No wider: while Playwright runs, asyncio.run is refused in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """An empty page. The test fails if the page logs an error or asks another host for anything."""
    with browser.new_context() as context:
        page = context.new_page()
        watched = Watched(page)
        yield page
        watched.check()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if find_chromium() is None:
        terminalreporter.write_line(f"pages are not tested: {MISSING}")
