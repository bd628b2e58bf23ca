"""Routes that the other node calls."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.core.rooms import parse_room
from app.errors import InvalidRequest
from app.service.decode import DecodeService
from app.service.node import Node
from app.service.prefill import PrefillService
from app.transfer.messages import (
    Abort,
    Accepted,
    Ahead,
    Complete,
    Destination,
    Drained,
    Failed,
    Introduction,
    Told,
)


def peer_router(node: Node, **options: Any) -> APIRouter:
    router = APIRouter(prefix="/v1/peer", tags=["peer"], **options)

    def prefill() -> PrefillService:
        node.context  # noqa: B018  raises NotReady while starting
        if node.prefill is None:
            raise InvalidRequest("this is no prefill node")
        return node.prefill

    def decode() -> DecodeService:
        node.context  # noqa: B018
        if node.decode is None:
            raise InvalidRequest("this is no decode node")
        return node.decode

    @router.post("/handshake", summary="Exchange fingerprints, endpoints and capabilities")
    async def handshake(message: Introduction) -> Introduction:
        return node.context.peers.welcome(message)

    @router.put("/rooms/{room}", status_code=202, summary="Decode names the pages of a prompt")
    async def destine(room: str, message: Destination) -> Accepted:
        return prefill().rooms.destine(parse_room(room), message)

    @router.post("/rooms/{room}/abort", summary="Give a room up; the answer acknowledges the drain")
    async def abort(room: str, message: Abort) -> Drained:
        return await prefill().rooms.abort(parse_room(room), message)

    @router.post("/rooms/{room}/ahead", summary="Prefill says which layers have landed so far")
    async def ahead(room: str, message: Ahead) -> Told:
        return await decode().rooms.ahead(parse_room(room), message)

    @router.post("/rooms/{room}/complete", summary="Prefill says that every byte has landed")
    async def complete(room: str, message: Complete) -> Told:
        return await decode().rooms.complete(parse_room(room), message)

    @router.post("/rooms/{room}/failed", summary="Prefill says that its leg has failed")
    async def failed(room: str, message: Failed) -> Told:
        return await decode().rooms.failed(parse_room(room), message)

    return router
