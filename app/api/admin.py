"""Health, statistics, rooms, fingerprint, abort: what people probe with curl."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from app import __version__
from app.api.problems import RoomInPath
from app.core.rooms import parse_room
from app.errors import NotReady, PeerAborted
from app.service.caches import cache_report, flush
from app.service.node import Node


class AbortBody(BaseModel):
    reason: str = Field("aborted by an operator", max_length=500)


class FlushBody(BaseModel):
    """Nothing given: both tiers, every prompt that nobody is using."""

    model_config = ConfigDict(extra="forbid")

    tier: Literal["all", "l1"] = "all"
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Health(BaseModel):
    status: str


class Aborted(BaseModel):
    room: int
    aborted: bool
    drained: bool


def admin_router(node: Node) -> APIRouter:
    router = APIRouter(tags=["admin"])

    @router.get("/livez", summary="The process and its forwards make progress")
    async def livez() -> Health:
        if not node.live:
            raise NotReady("a forward makes no progress")
        return Health(status="live")

    @router.get("/readyz", summary="Requests can be served")
    async def readyz() -> Health:
        reason = node.why_not_ready()
        if reason is not None:
            raise NotReady(reason)
        return Health(status="ready")

    @router.get("/health", summary="As /readyz, under the name that routers ask")
    async def health() -> Health:
        return await readyz()

    @router.get("/stats", summary="Snapshot of pools, rooms, transfers and counters")
    async def stats() -> dict[str, Any]:
        return node.statistics()

    @router.get("/fingerprint", summary="The runtime contract, as parts and one hash")
    async def fingerprint() -> dict[str, Any]:
        return {"hash": node.fingerprint.hash, "parts": dict(node.fingerprint.parts)}

    @router.get("/rooms", summary="Live rooms, and the last ones that ended")
    async def rooms() -> dict[str, Any]:
        return {"live": node.rooms(), "ended": node.ended_rooms()}

    @router.get("/cache", summary="Occupancy of the tiers, hits, pins, extents, copies")
    async def cache() -> dict[str, Any]:
        return cache_report(node.context)

    @router.post("/cache/flush", summary="Forget cached prompts that nobody is using")
    async def cache_flush(body: FlushBody | None = None) -> dict[str, Any]:
        wanted = body or FlushBody()
        return flush(node.context, which=wanted.tier, salt=wanted.cache_salt, rooms=len(node.rooms()))

    @router.post("/abort/{room}", summary="Fail a live room")
    async def abort(room: RoomInPath, body: AbortBody | None = None) -> Aborted:
        job = node.job(parse_room(room))
        reason = (body or AbortBody()).reason
        return Aborted(room=job.room, aborted=job.fail(PeerAborted(reason)), drained=job.ended.is_set())

    @router.get("/server_info", summary="What routers ask about a node")
    async def server_info() -> dict[str, Any]:
        context = node.context
        return {
            "version": __version__,
            "served_model_name": context.engine.name,
            "model_path": context.engine.name,
            "disaggregation_mode": node.settings.role,
            "tp_size": 1,
            "dp_size": 1,
            "page_size": node.settings.cache.page_size,
            "max_total_num_tokens": node.settings.cache.pages * node.settings.cache.page_size,
            "instance": node.instance,
        }

    @router.get("/model_info", summary="What routers ask about the model")
    async def model_info() -> dict[str, Any]:
        engine = node.context.engine
        return {
            "model_path": engine.name,
            "tokenizer_path": engine.name,
            "is_generation": True,
            "revision": engine.revision,
            "dtype": engine.compute_dtype,
        }

    @router.get("/v1/models", summary="The served model")
    async def models() -> dict[str, Any]:
        name = node.context.engine.name
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "kvferry"}]}

    return router
