"""From settings to the parts of a node: model, pool, transfer engine, tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from app.core.fingerprint import Fingerprint, build_fingerprint
from app.core.holds import Quarantine
from app.core.ids import InstanceId
from app.core.slots import SlotFormat, SlotTable
from app.engine.base import Engine, Text
from app.engine.generate import TOP_K
from app.engine.load import load_engine
from app.engine.models.overrides import merge_overrides
from app.errors import SettingsError
from app.hosts import AllowedHosts, allowed_hosts
from app.service.context import NodeContext
from app.service.diagnostics import Diagnostics
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.service.tiers import make_tiers
from app.settings import NodeSettings
from app.settings.credentials import client_tls, peer_secret
from app.tiers.device import DevicePool
from app.tiers.events import EventBridge
from app.transfer import mooncake
from app.transfer.base import EngineDriver, Region
from app.transfer.blocks import BufferLayout, Layouts
from app.transfer.breaker import Breakers
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
    hosts: AllowedHosts | None = None,
    driver: DriverFactory | None = None,
    client: ControlClient | None = None,
) -> Parts:
    """Load the model, map the pool, start the engine and register the pool with it.

    `hosts` limits whom the node calls. `driver` and `client` stand in for the real engine and for HTTP.
    """
    load = partial(load_model, settings)
    engine, text = await asyncio.get_running_loop().run_in_executor(None, load)
    form = SlotFormat()
    if engine.draft is not None:
        form = SlotFormat(hidden=engine.draft.hidden_size, top_k=TOP_K)
    fingerprint = build_fingerprint(
        geometry=engine.geometry,
        model=engine.name,
        model_revision=engine.revision,
        compute_dtype=engine.compute_dtype,
        draft=None if engine.draft is None else engine.draft.name,
        digest_mode=settings.transfer.digests,
        slots=form,
        hidden_size=engine.hidden_size,
        reuse=_reuse(settings),
    )
    pools = make_pools(settings, engine, form)
    engine.bind(pools)
    transfers = await start_transfers(settings, pools, driver or mooncake_driver(settings))
    layouts = tuple(pool_layouts(pool) for pool in pools)
    control = client or control_client(settings, hosts)
    handshake_s = settings.deadlines.handshake_s
    gate: PageGate | None = None
    tiers = make_tiers(settings, pools, freed=lambda: gate.serve() if gate is not None else None)
    gate = PageGate(tiers.cache, max_waiting=settings.limits.queued_requests)
    context = NodeContext(
        settings=settings,
        instance=instance,
        engine=engine,
        pools=pools,
        layouts=layouts,
        fingerprint=fingerprint,
        tiers=tiers,
        gate=gate,
        slots=SlotTable(settings.cache.slots),
        quarantine=Quarantine(),
        forwards=Forwards(threads=settings.model.threads, stall_s=settings.deadlines.stall_s),
        bridge=EventBridge(settings.model.device),
        transfers=transfers,
        client=control,
        peers=Peers(introduction, lambda: layouts[0], control, transfers, timeout_s=handshake_s),
        spawn=spawn,
        digest_thread=ThreadPoolExecutor(1, thread_name_prefix="kvferry-digest"),
        breakers=Breakers(
            failures=settings.deadlines.heartbeat_misses, pause_s=settings.deadlines.breaker_open_s
        ),
        diagnostics=Diagnostics(settings.diagnostics, pools, tiers.cache.lanes),
    )
    return Parts(context, text, fingerprint)


def bootstrap_hosts(settings: NodeSettings) -> AllowedHosts | None:
    """Whom a decode node may contact because a request says so; None for prefill, which calls whom it has met."""
    if settings.role == "prefill":
        return None
    return allowed_hosts(settings.limits.bootstrap_hosts, settings.http.host)


def control_client(settings: NodeSettings, hosts: AllowedHosts | None) -> HttpControlClient:
    """How a node talks to its peers. The caller closes it."""
    return HttpControlClient(
        token=peer_secret(settings.auth),
        hosts=hosts,
        tls=client_tls(settings.http),
        most_bytes=settings.http.max_body_bytes,
    )


def load_model(settings: NodeSettings) -> tuple[Engine, Text]:
    """The engine that the settings ask for, and its text side. Blocks for seconds."""
    model, split = settings.model, settings.cp.split
    assert split != "round_robin", "refused by the settings"
    return load_engine(
        name=model.name,
        page_size=settings.cache.page_size,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        layer_delay_s=model.layer_delay_s,
        cache_dtype=settings.cache.dtype,
        kv=model.kv,
        ranks=settings.cp.size,
        split=split,
        draft=model.draft,
        overrides=merge_overrides(
            model.overrides, freq=model.index_topk_freq, offset=model.index_skip_topk_offset
        ),
    )


def make_pools(settings: NodeSettings, engine: Engine, form: SlotFormat) -> tuple[DevicePool, ...]:
    """A pool for each rank, each on a device of its own where there are several; slots in the first."""
    cache, device = settings.cache, settings.model.device
    devices: list[str] = [device] * settings.cp.size
    if device == "cuda" and settings.cp.size > 1:
        devices = [f"cuda:{rank}" for rank in range(settings.cp.size)]
        if torch.cuda.device_count() < settings.cp.size:
            raise SettingsError(
                f"cp.size ({settings.cp.size}): there are {torch.cuda.device_count()} devices"
            )
    return tuple(
        DevicePool(engine.geometry, cache.pages, 0 if rank else cache.slots, device=name, slot_format=form)
        for rank, name in enumerate(devices)
    )


async def start_transfers(
    settings: NodeSettings, pools: Sequence[DevicePool], driver: DriverFactory
) -> tuple[WindowedEngine, ...]:
    """A transfer session for each rank, its pool registered. None is left running when one fails."""
    started: list[WindowedEngine] = []
    try:
        for pool in pools:
            transfer = WindowedEngine(driver, limits(settings))
            await transfer.start()
            started.append(transfer)
            if settings.cp.shared_kv and not transfer.addressed:
                raise SettingsError(
                    f"cp.shared_kv: the transfer engine ({transfer.transport}) cannot send the pages of one "
                    "owner to positions of their own"
                )
            regions = [Region(name, b.base, b.length) for name, b in pool.buffers.items()]
            if pool.slots.numel():
                regions.append(Region("slots", pool.slots.data_ptr(), pool.slots.numel()))
            await transfer.register(regions)
    except BaseException:
        for transfer in started:
            await transfer.close()
        raise
    return tuple(started)


def pool_layouts(pool: DevicePool) -> Layouts:
    """Where a pool's buffers lie."""
    return {
        name: BufferLayout(spec=b.spec, base=b.base, layer_stride=b.layer_stride, pages=pool.pages)
        for name, b in pool.buffers.items()
    }


def _reuse(settings: NodeSettings) -> str:
    """Only exact reuse has to be alike at both ends: its grid is that of prefill's chunks."""
    return f"exact/{settings.prefill.chunk_tokens}" if settings.cache.reuse == "exact" else "any"


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
