"""The token that a server may require."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import HTTPException, Request


def brings_token(request: Request, token: str) -> bool:
    """Whether a request has the token; always true if the server requires none."""
    given = request.headers.get("Authorization", "")
    return not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def token_check(token: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency that refuses requests without the token."""

    async def check(request: Request) -> None:
        if not brings_token(request, token):
            raise HTTPException(
                401,
                "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'",
                {"WWW-Authenticate": "Bearer"},
            )

    return check
