"""From settings to the parts of a node: model, pool, transfer engine, tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from app.core.fingerprint import Fingerprint, build_fingerprint
from app.core.holds import Quarantine
from app.core.ids import InstanceId
from app.core.lanes import PageLane
from app.core.slots import SLOT_BYTES, SlotTable
from app.engine.base import Text
from app.engine.load import load_engine
from app.errors import SettingsError
from app.service.context import NodeContext
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.settings import NodeSettings
from app.tiers.device import DevicePool
from app.tiers.events import EventBridge
from app.transfer import mooncake
from app.transfer.base import EngineDriver, Region
from app.transfer.blocks import BufferLayout
from app.transfer.client import ControlClient, HttpControlClient
from app.transfer.engine import Engine as WindowedEngine
from app.transfer.engine import Limits
from app.transfer.messages import Introduction
from app.transfer.peers import Peers

DriverFactory = Callable[[], EngineDriver]


class Parts(NamedTuple):
    """What `build` makes. The caller closes the context's resources."""

    context: NodeContext
    text: Text
    fingerprint: Fingerprint


async def build(
    settings: NodeSettings,
    *,
    instance: InstanceId,
    introduction: Callable[[], Introduction],
    spawn: Callable[[Coroutine[Any, Any, None], str], None],
    driver: DriverFactory | None = None,
    client: ControlClient | None = None,
) -> Parts:
    """Load the model, map the pool, start the engine and register the pool with it.

    `driver` and `client` stand in for the real engine and for HTTP.
    """
    model = settings.model
    load = partial(
        load_engine,
        name=model.name,
        page_size=settings.cache.page_size,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        layer_delay_s=model.layer_delay_s,
    )
    engine, text = await asyncio.get_running_loop().run_in_executor(None, load)
    pool = DevicePool(engine.geometry, settings.cache.pages, settings.cache.slots, device=model.device)
    engine.bind(pool)
    transfer = WindowedEngine(driver or mooncake_driver(settings), limits(settings))
    await transfer.start()
    regions = [Region(name, b.base, b.length) for name, b in pool.buffers.items()]
    await transfer.register([*regions, Region("slots", pool.slots.data_ptr(), pool.slots.numel())])
    layouts = {
        name: BufferLayout(spec=b.spec, base=b.base, layer_stride=b.layer_stride, pages=settings.cache.pages)
        for name, b in pool.buffers.items()
    }
    control = client or HttpControlClient(token=settings.secret())
    fingerprint = build_fingerprint(
        geometry=engine.geometry,
        model=engine.name,
        model_revision=engine.revision,
        compute_dtype=engine.compute_dtype,
        draft=None,
        digest_mode=settings.transfer.digests,
        slot_bytes=SLOT_BYTES,
    )
    handshake_s = settings.deadlines.handshake_s
    context = NodeContext(
        settings=settings,
        instance=instance,
        engine=engine,
        pool=pool,
        layouts=layouts,
        gate=PageGate(PageLane(settings.cache.pages), max_waiting=settings.limits.queued_requests),
        slots=SlotTable(settings.cache.slots),
        quarantine=Quarantine(),
        forwards=Forwards(threads=model.threads, stall_s=settings.deadlines.stall_s),
        bridge=EventBridge(model.device),
        transfer=transfer,
        client=control,
        peers=Peers(introduction, lambda: layouts, control, transfer, timeout_s=handshake_s),
        spawn=spawn,
        digest_thread=ThreadPoolExecutor(1, thread_name_prefix="kvferry-digest"),
    )
    return Parts(context, text, fingerprint)


def mooncake_driver(settings: NodeSettings) -> DriverFactory:
    """The real engine, its environment in place. SettingsError on timeouts that prove nothing."""
    transfer, host = settings.transfer, settings.http.advertise or settings.http.host
    if transfer.late_landing_s <= transfer.progress_timeout_s:
        raise SettingsError(
            f"transfer.late_landing_s ({transfer.late_landing_s}) must outlive the engine's own timeout, "
            f"transfer.progress_timeout_s ({transfer.progress_timeout_s})"
        )
    mooncake.prepare(
        mooncake.environment(
            bind=settings.http.host,
            lanes=transfer.lanes,
            progress_timeout_s=transfer.progress_timeout_s,
        )
    )
    return partial(mooncake.MooncakeDriver, host)


def limits(settings: NodeSettings) -> Limits:
    """The engine's limits out of the settings."""
    t = settings.transfer
    return Limits(
        window_descriptors=t.window_descriptors,
        window_bytes=t.window_bytes,
        descriptor_bytes=t.descriptor_bytes,
        deadline_s=t.deadline_s,
        retries=t.retries,
        retry_after_s=t.retry_after_s,
        late_landing_s=t.late_landing_s,
    )
