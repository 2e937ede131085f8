"""What a server is told when it starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anywidth_runtime.errors import RequestError

TOKEN_VARIABLE = "ANYWIDTH_TOKEN"


@dataclass(frozen=True)
class Settings:
    """How a bundle is served.

    Args:
        name: of the model in addresses: /v2/models/NAME/infer.
        deadline_ms: when answers are due to requests that name no deadline.
        late: "drop" answers 503 to a request that cannot be in time, "answer" answers it late.
        least_width: the governor never goes narrower; requests may ask for what they like.
        least_accuracy: the governor never goes below this accuracy.
        hysteresis: the governor widens only if this share of the time is left over.
        overhead_ms: what an answer takes from the end of a run to the client.
        threads: that one run of the network may use.
        workers: runs that go on at once; 0 for one per core and threads, less one core.
        most_waiting: requests that may wait; one more is answered 503.
        most_body: bytes that a request may have; more is answered 413.
        most_held: bytes that all requests together may have; more is answered 503.
        most_pixels: pixels that an image may have; more is answered 413.
        token: what requests must bring as `Authorization: Bearer TOKEN`; "" for none.
        has_page: whether `/` shows the page.
        has_load: whether the page can put load on the server, to show the governor at work.
    """

    name: str = "net"
    deadline_ms: float = 1000.0
    late: Literal["drop", "answer"] = "drop"
    least_width: float | None = None
    least_accuracy: float | None = None
    hysteresis: float = 0.0
    overhead_ms: float = 1.0
    threads: int = 1
    workers: int = 0
    most_waiting: int = 256
    most_body: int = 16 * 2**20
    most_held: int = 512 * 2**20
    most_pixels: int = 4_000_000
    token: str = ""
    has_page: bool = True
    has_load: bool = True

    def __post_init__(self) -> None:
        if not self.name or not all(part.isalnum() or part in "-_." for part in self.name):
            raise RequestError(f"name={self.name!r}: expected letters, digits, '-', '_' and '.'")
        if not 0 < self.deadline_ms < math.inf:
            raise RequestError(f"deadline_ms={self.deadline_ms!r}: expected milliseconds above 0")
        for name in ("threads", "most_waiting", "most_body", "most_held", "most_pixels"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)!r}: expected at least 1")
        if self.workers < 0:
            raise RequestError(f"workers={self.workers}: expected at least 1, or 0 to choose")

    @property
    def worker_count(self) -> int:
        if self.workers:
            return self.workers
        # One core is left to the server itself: it reads requests and decodes images.
        return max(1, (len(os.sched_getaffinity(0)) - 1) // self.threads)


def read_token(file: Path | None) -> str:
    """The token in a file or in the environment; never on the command line, where others see it."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the token's file {file} cannot be read: {error}") from error
    if not token:
        raise RequestError(f"the token's file {file} is empty: write a token into it")
    return token


def model_name(bundle: Path) -> str:
    """A file's name as a model's: letters, digits, '-', '_' and '.'."""
    name = "".join(one if one.isalnum() or one in "-_." else "-" for one in bundle.stem)
    return name or "net"
