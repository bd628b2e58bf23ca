"""The bearer token of calls that change state."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header

from app.errors import TokenMissing, TokenWrong


def token_check(token: str | None) -> Callable[..., Awaitable[None]]:
    """A dependency: 401 without a token, 403 with a wrong one; nothing where no token is set."""

    # a coroutine, although it awaits nothing: FastAPI would run a plain function in a thread, for each call
    async def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if token is None:
            return
        if not authorization or not authorization.lower().startswith("bearer "):
            raise TokenMissing("this call needs 'Authorization: Bearer TOKEN'")
        given = authorization[len("bearer ") :].strip()
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise TokenWrong("the token is wrong")

    return check
