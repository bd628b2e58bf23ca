"""Both legs of one request inside this process."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Sequence

from app.errors import KvferryError
from app.service.awake import within
from app.service.decode_job import DecodeJob
from app.service.jobs import Job, Request, TokenOut
from app.service.prefill_job import PrefillJob

WITHIN_S = 10.0
"""Bound of every wait in these tests: generous, since the machine may be busy."""


class Legs:
    """Both legs of one request; either may be missing."""

    def __init__(
        self, *, request: Request, prefill: PrefillJob | None = None, decode: DecodeJob | None = None
    ) -> None:
        self.request = request
        self._prefill = prefill
        self._decode = decode
        self._received: list[TokenOut] | None = None

    @property
    def prefill(self) -> PrefillJob:
        assert self._prefill is not None, "this request has no prefill leg"
        return self._prefill

    @prefill.setter
    def prefill(self, job: PrefillJob) -> None:
        self._prefill = job

    @property
    def decode(self) -> DecodeJob:
        assert self._decode is not None, "this request has no decode leg"
        return self._decode

    @decode.setter
    def decode(self, job: DecodeJob) -> None:
        self._decode = job

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def jobs(self) -> list[Job]:
        return [job for job in (self._prefill, self._decode) if job is not None]

    async def answered(self) -> list[TokenOut]:
        """Wait for both outcomes (not for the drain) and return decode's tokens."""
        try:
            for job in self.jobs:
                await within(job.answered.wait(), WITHIN_S)
        except TimeoutError:
            raise AssertionError(f"no outcome within {WITHIN_S} s\n{standing(self.jobs)}") from None
        return await self.tokens() if self._decode is not None else []

    async def tokens(self) -> list[TokenOut]:
        if self._received is None:
            tokens = []
            while (token := await within(self.decode.output.get(), WITHIN_S)) is not None:
                tokens.append(token)
            self._received = tokens
        return self._received

    async def failed(self) -> tuple[KvferryError | None, KvferryError | None]:
        """Wait for both outcomes; their reasons, prefill's first."""
        await self.answered()
        reasons = [None if job is None else job.life.reason for job in (self._prefill, self._decode)]
        return reasons[0], reasons[1]


def standing(jobs: Sequence[Job]) -> str:
    """Where rooms, coroutines and threads stand: for the message of a test that waited in vain."""
    lines = [repr(job.record()) for job in jobs]
    for task in asyncio.all_tasks():
        lines.append(f"task {task.get_name()}")
        lines += [f"    {frame.f_code.co_name}:{frame.f_lineno}" for frame in task.get_stack()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}")
        lines += [f"    {frame.name}:{frame.lineno}" for frame in traceback.extract_stack(top)[-6:]]
    return "\n".join(lines)
