"""The settings of a server."""

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
        name: the model's name in addresses: /v2/models/NAME/infer.
        deadline_ms: deadline of requests that do not have one.
        late: "drop" answers 503 to a request that cannot be in time, "answer" answers it late.
        least_width: the governor never goes narrower; requests may still ask for any width.
        least_accuracy: the governor never goes below this accuracy.
        hysteresis: the governor widens only if this share of the time is to spare.
        overhead_ms: time from the end of a run until the client has the answer.
        threads: number of threads per run.
        workers: number of runs at the same time; 0 chooses cores / threads, less one core.
        most_waiting: largest number of waiting requests; further ones are answered 503.
        most_body: largest number of bytes per request; larger ones are answered 413.
        most_held: largest number of bytes of all requests together; further ones get 503.
        most_pixels: largest number of pixels per image; larger ones are answered 413.
        token: requests must send `Authorization: Bearer TOKEN`; "" for none.
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
        # One core is left for the server itself, which reads requests and decodes images.
        return max(1, (len(os.sched_getaffinity(0)) - 1) // self.threads)


def read_token(file: Path | None) -> str:
    """Read the token from a file or the environment; others could see it on the command line."""
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
    """The name of a file as the name of a model: letters, digits, '-', '_' and '.'."""
    name = "".join(one if one.isalnum() or one in "-_." else "-" for one in bundle.stem)
    return name or "net"
