"""Routes that the other node calls."""

from __future__ import annotations

from fastapi import APIRouter

from app.api.problems import RoomInPath
from app.core.rooms import parse_room
from app.errors import InvalidRequest, NotReady
from app.service.decode import DecodeService
from app.service.node import Node
from app.service.prefill import PrefillService
from app.transfer.messages import (
    Abort,
    Accepted,
    Ahead,
    Alive,
    Complete,
    Destination,
    Drained,
    Failed,
    Heartbeat,
    Introduction,
    Told,
)


def peer_router(node: Node) -> APIRouter:
    router = APIRouter(prefix="/v1/peer", tags=["peer"])

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

    @router.post("/heartbeat", summary="Whether this node is there, and which rooms it has given up")
    async def heartbeat(message: Heartbeat) -> Alive:
        if node.decode is not None:
            return node.decode.rooms.heartbeat(message)
        return Alive(instance=node.context.instance, gone=message.rooms)

    @router.put("/rooms/{room}", status_code=202, summary="Decode names the pages of a prompt")
    async def destine(room: RoomInPath, message: Destination) -> Accepted:
        rooms, number = prefill().rooms, parse_room(room)
        if node.draining and number not in rooms.table:
            raise NotReady("the node is draining", room=number)
        return rooms.destine(number, message)

    @router.post("/rooms/{room}/abort", summary="Give a room up; the answer acknowledges the drain")
    async def abort(room: RoomInPath, message: Abort) -> Drained:
        return await prefill().rooms.abort(parse_room(room), message)

    @router.post("/rooms/{room}/ahead", summary="Prefill says which layers have landed so far")
    async def ahead(room: RoomInPath, message: Ahead) -> Told:
        return await decode().rooms.ahead(parse_room(room), message)

    @router.post("/rooms/{room}/complete", summary="Prefill says that every byte has landed")
    async def complete(room: RoomInPath, message: Complete) -> Told:
        return await decode().rooms.complete(parse_room(room), message)

    @router.post("/rooms/{room}/failed", summary="Prefill says that its leg has failed")
    async def failed(room: RoomInPath, message: Failed) -> Told:
        return await decode().rooms.failed(parse_room(room), message)

    return router
