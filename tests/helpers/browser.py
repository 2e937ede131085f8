"""Finding Chromium, and watching what a page in it says and asks for."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Page

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
HERE = ("", "localhost", "127.0.0.1", "::1")

MISSING = (
    "no Chromium was found: install one (apt-get install chromium), or set CHROMIUM to its path"
)


def find_chromium() -> str | None:
    """The browser that CHROMIUM names, else one of the usual names."""
    named = os.environ.get("CHROMIUM")
    return next(filter(None, map(shutil.which, [named] if named else NAMES)), None)


class Watched:
    """What went wrong on a page: errors that it logs or raises, and requests to other hosts."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))
        page.on("request", lambda request: self._note(request.url))

    def _note(self, address: str) -> None:
        if (urlsplit(address).hostname or "") not in HERE:
            self.foreign.append(address)

    def check(self) -> None:
        # Under the load of "Hold a deadline" the server may drop a request, as it should; only a
        # page that has held one may log that.
        if self.page.evaluate("window.performance.getEntriesByName('load-test').length"):
            self.errors = [text for text in self.errors if "503 (Service Un" not in text]
        assert not self.errors, self.errors
        assert not self.foreign, self.foreign
