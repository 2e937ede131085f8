"""Send requests to a server on this machine at given moments, whether or not it keeps up.

Connections are kept open and used again. A client that waited for answers before it sends more
would hide the effect of a queue.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_HOST = "127.0.0.1"
_PATIENCE = 60.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Answered:
    """One request: its status (0 if the connection broke), its time and what came back."""

    status: int
    milliseconds: float
    parameters: dict[str, Any] = field(default_factory=dict)


def infer_request(port: int, name: str, body: bytes, json_length: int | None) -> bytes:
    """The bytes of a POST to /infer."""
    length = "" if json_length is None else f"Inference-Header-Content-Length: {json_length}\r\n"
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: {_HOST}:{port}\r\n{length}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def image_request(port: int, name: str, image: bytes, query: str) -> bytes:
    """The bytes of a POST of an image file to /infer."""
    head = (
        f"POST /v2/models/{name}/infer?{query} HTTP/1.1\r\nHost: {_HOST}:{port}\r\n"
        f"Content-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
    )
    return head.encode() + image


def send_at(port: int, moments: Sequence[float], request: bytes) -> list[Answered]:
    """Send the request at each moment (seconds from the start) and return all answers."""
    return asyncio.run(_send_all(port, moments, request))


def statuses(answers: Iterable[Answered]) -> dict[int, int]:
    return dict(Counter(one.status for one in answers))


async def _send_all(port: int, moments: Sequence[float], request: bytes) -> list[Answered]:
    idle: list[Connection] = []
    start = time.perf_counter()
    tasks = []
    for moment in moments:
        delay = start + moment - time.perf_counter()
        # Yields even if it is late, because otherwise no answer would be read.
        await asyncio.sleep(max(0.0, delay))
        tasks.append(asyncio.create_task(_send(port, request, idle)))
    answers = await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return answers


async def _send(port: int, request: bytes, idle: list[Connection]) -> Answered:
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE):
            pair, (status, keeps_open, body) = await _exchange(port, request, idle)
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return Answered(0, 1000 * (time.perf_counter() - sent))
    milliseconds = 1000 * (time.perf_counter() - sent)
    if keeps_open:
        idle.append(pair)
    else:
        pair[1].close()
    parameters = json.loads(body).get("parameters", {}) if body.startswith(b"{") else {}
    return Answered(status, milliseconds, parameters)


async def _exchange(
    port: int, request: bytes, idle: list[Connection]
) -> tuple[Connection, tuple[int, bool, bytes]]:
    """Send a request on an idle connection, or on a new one if the server has closed that.

    Servers close connections that were idle for some seconds, and clients must then try again.
    """
    while idle:
        pair = idle.pop()
        try:
            pair[1].write(request)
            return pair, await _read(pair[0])
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            pair[1].close()
            if getattr(error, "partial", b""):
                raise
    pair = await asyncio.open_connection(_HOST, port)
    pair[1].write(request)
    return pair, await _read(pair[0])


async def _read(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    """Status, whether the connection stays, and the JSON part of the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    length = int(headers.get("inference-header-content-length", len(body)))
    return int(head[0].split()[1]), headers.get("connection") != "close", body[:length]
