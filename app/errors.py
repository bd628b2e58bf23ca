"""Every error that kvferry raises on purpose.

    KvferryError
    |-- SettingsError            a setting is unknown, invalid or contradicts another (start-up only)
    |-- BadInput                 the caller's fault
    |   |-- InvalidRequest         malformed body, empty prompt, unsupported field
    |   |-- PromptTooLong
    |   |-- PageMismatch           counts or positions of source and destination differ
    |   |-- UnknownRoom
    |   `-- RoomInUse
    |-- Denied                   authentication
    |   |-- TokenMissing
    |   |-- TokenWrong
    |   |-- ScopeMissing           a token, but not for this
    |   `-- HostDenied             a host that this node is not allowed to contact
    |-- PeerFault                the other node's fault
    |   |-- PeerUnavailable        no answer, connection refused, wrong protocol
    |   |-- PeerRefused            it answered with a refusal
    |   |-- FingerprintMismatch    the two runtime contracts differ
    |   `-- PeerAborted            it (or its client) gave the room up
    |-- DeadlineExceeded         a phase outlived its setting
    |-- NoCapacity               no page, slot or queue place
    |   `-- TooManyRooms           of one peer
    |-- NotReady                 the node is starting or draining
    |-- TransferFailed           the engine could not deliver
    |-- Corruption               bytes or records that are not what was sent
    |-- ClientGone               the client closed its connection
    |-- IllegalTransition        our fault: a lifecycle event that the table does not allow
    `-- IntegrityError           our fault: a structure contradicts itself

`status` is the HTTP status that the API answers with; `slug` is the stable last part of the problem
type (RFC 9457). `room`, `rank`, `layer` and `leg` (which half of the request has failed) are carried where they are
known.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

LegName = Literal["prefill", "decode"]
"""A half of a request."""


class KvferryError(Exception):
    """Base of all errors of this package."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        *,
        room: int | None = None,
        rank: int | None = None,
        layer: int | None = None,
        leg: LegName | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.room = room
        self.rank = rank
        self.layer = layer
        self.leg = leg
        self.details = details

    def fields(self) -> dict[str, Any]:
        """The parts that a log line or a problem document shows beside the message."""
        places = {"room": self.room, "rank": self.rank, "layer": self.layer, "leg": self.leg}
        return {k: v for k, v in places.items() if v is not None} | self.details


class SettingsError(KvferryError):
    slug = "settings"


class BadInput(KvferryError):
    status = 400
    slug = "bad-input"


class InvalidRequest(BadInput):
    status = 422
    slug = "invalid-request"


class PromptTooLong(BadInput):
    status = 413
    slug = "prompt-too-long"


class PageMismatch(BadInput):
    status = 409
    slug = "page-mismatch"


class UnknownRoom(BadInput):
    status = 404
    slug = "unknown-room"


class RoomInUse(BadInput):
    status = 409
    slug = "room-in-use"


class Denied(KvferryError):
    status = 403
    slug = "denied"


class TokenMissing(Denied):
    status = 401
    slug = "token-missing"


class TokenWrong(Denied):
    status = 403
    slug = "token-wrong"


class ScopeMissing(Denied):
    slug = "scope-missing"


class HostDenied(Denied):
    slug = "host-denied"


class PeerFault(KvferryError):
    status = 502
    slug = "peer-fault"


class LeaseExpired(PeerFault):
    """Decode has not said for too long that it still wants what prefill writes."""

    status = 504
    slug = "lease-expired"


class PeerUnavailable(PeerFault):
    status = 503
    slug = "peer-unavailable"
    retry_after_s = 1


class PeerRefused(PeerFault):
    slug = "peer-refused"


class FingerprintMismatch(PeerFault):
    status = 409
    slug = "fingerprint-mismatch"


class PeerAborted(PeerFault):
    slug = "peer-aborted"


class DeadlineExceeded(KvferryError):
    status = 504
    slug = "deadline"


class NoCapacity(KvferryError):
    status = 503
    slug = "no-capacity"
    retry_after_s = 1


class TooManyRooms(NoCapacity):
    status = 429
    slug = "too-many-rooms"


class NotReady(KvferryError):
    status = 503
    slug = "not-ready"
    retry_after_s = 1


class TransferFailed(KvferryError):
    status = 502
    slug = "transfer-failed"


class Corruption(KvferryError):
    status = 502
    slug = "corruption"


class ClientGone(KvferryError):
    status = 499
    slug = "client-gone"


class IllegalTransition(KvferryError):
    slug = "illegal-transition"


class IntegrityError(KvferryError):
    slug = "integrity"
