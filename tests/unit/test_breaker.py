"""The circuit of a peer that does not answer."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import DeadlineExceeded, PeerRefused, PeerUnavailable
from app.transfer.breaker import TRANSITIONS, Breakers, Circuit, Sign

URL = "http://127.0.0.1:1"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def silent(breakers: Breakers, error: Exception | None = None) -> None:
    with pytest.raises((PeerUnavailable, DeadlineExceeded)), breakers.attempt(URL):
        raise error or PeerUnavailable("connection refused")


def opened() -> tuple[Breakers, Clock]:
    clock = Clock()
    breakers = Breakers(failures=3, pause_s=5.0, clock=clock)
    for _ in range(3):
        assert breakers.state(URL) is Circuit.CLOSED
        silent(breakers)
    assert breakers.state(URL) is Circuit.OPEN
    return breakers, clock


def test_failures_in_a_row_open_it_and_requests_are_refused_at_once() -> None:
    """Three failures open a circuit; a request is then refused with the reason, without asking the peer."""
    breakers, _ = opened()
    with (
        pytest.raises(PeerUnavailable, match=r"connection refused.*next try is in 5.0 s") as caught,
        breakers.attempt(URL),
    ):
        pytest.fail("the peer was asked")
    assert caught.value.retry_after_s == 5
    assert (breakers.refused, breakers.opened) == (1, 1)
    assert breakers.snapshot()[URL]["state"] == "open"


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    """Only failures in a row count; a peer that answers leaves nothing behind."""
    breakers = Breakers(failures=2, pause_s=5.0)
    silent(breakers)
    with breakers.attempt(URL):
        pass
    assert breakers.snapshot() == {}
    silent(breakers, DeadlineExceeded("late"))
    assert breakers.state(URL) is Circuit.CLOSED


def test_one_request_tries_after_the_pause() -> None:
    """Half open, one request asks the peer and others are refused; its answer closes the circuit."""
    breakers, clock = opened()
    clock.now = 5.0
    with breakers.attempt(URL):
        assert breakers.state(URL) is Circuit.HALF_OPEN
        with pytest.raises(PeerUnavailable, match="another request is trying"), breakers.attempt(URL):
            pytest.fail("two tried")
    assert breakers.state(URL) is Circuit.CLOSED


def test_a_try_without_answer_opens_it_for_another_pause() -> None:
    """The pause begins again with the failed try."""
    breakers, clock = opened()
    clock.now = 5.0
    silent(breakers)
    assert breakers.state(URL) is Circuit.OPEN
    clock.now = 9.9
    with pytest.raises(PeerUnavailable, match=r"next try is in 0\.1 s"), breakers.attempt(URL):
        pytest.fail("the peer was asked")


def test_a_refusal_is_an_answer_and_a_cancelled_try_is_none() -> None:
    """A peer that refuses is there; a try that was cancelled does not leave the circuit half open."""
    breakers, clock = opened()
    clock.now = 5.0
    with pytest.raises(asyncio.CancelledError), breakers.attempt(URL):
        raise asyncio.CancelledError
    assert breakers.state(URL) is Circuit.OPEN
    clock.now = 10.0
    with pytest.raises(PeerRefused), breakers.attempt(URL):
        raise PeerRefused("another fingerprint")
    assert breakers.state(URL) is Circuit.CLOSED


def test_urls_that_clients_make_up_do_not_pile_up() -> None:
    """The number of circuits is bounded."""
    breakers = Breakers(failures=1, pause_s=5.0)
    for number in range(3000):
        breakers.failed(f"http://host-{number}", "no")
    assert len(breakers.snapshot()) <= 1024


def test_every_state_knows_answer_and_silence() -> None:
    """The table is total but for a pause that can only end where one has begun."""
    assert set(TRANSITIONS) == {(c, s) for c in Circuit for s in (Sign.ANSWER, Sign.SILENCE)} | {
        (Circuit.OPEN, Sign.PAUSE_OVER)
    }
