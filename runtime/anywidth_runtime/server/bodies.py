"""Read the bodies of requests, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from anywidth_runtime.errors import RequestError

# Seconds within which a body must arrive.
_PATIENCE = 30.0


class BodyTooLarge(RequestError):
    """A request has more bytes than the server accepts."""


class TooMuchHeld(RequestError):
    """The bodies of all requests together have more bytes than the server holds."""


class BodyTooSlow(RequestError):
    """The body of a request did not arrive in time."""


class Bodies:
    """Holds bodies while their requests are answered.

    Args:
        most: largest number of bytes of one body.
        most_held: largest number of bytes of all bodies together.
    """

    def __init__(self, most: int, most_held: int) -> None:
        self._most = most
        self._most_held = most_held
        self.held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; it counts as held until the block ends."""
        chunks: list[bytes] = []
        size = 0
        told = request.headers.get("Content-Length", "")
        if told.isdigit() and int(told) > self._most:
            raise self._too_large()
        try:
            try:
                async with asyncio.timeout(_PATIENCE):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self.held += len(chunk)
                        chunks.append(chunk)
                        if size > self._most:
                            raise self._too_large()
                        if self.held > self._most_held:
                            raise TooMuchHeld("the server holds too many bytes; try again later")
            except TimeoutError as error:
                raise BodyTooSlow(f"the body did not arrive within {_PATIENCE:g} s") from error
            yield b"".join(chunks)
        finally:
            self.held -= size

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"a request of more than {self._most} bytes: send less, or start the server with a "
            "larger --most-body"
        )
